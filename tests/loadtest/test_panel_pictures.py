"""What drawing dashboards says when it cannot; tests/helm/test_live.py draws them."""

from loadtest.panel_pictures import main


def test_a_missing_prometheus_is_named_with_its_setting(tmp_path, capsys):
    arguments = ["--prometheus-url", "http://127.0.0.1:1", "--output", str(tmp_path)]
    assert main(arguments) == 1
    assert "--prometheus-url http://127.0.0.1:1" in capsys.readouterr().err


def test_a_file_that_is_no_dashboard_is_named(tmp_path, capsys):
    file = tmp_path / "panels.json"
    file.write_text("no JSON")
    assert main([str(file), "--output", str(tmp_path)]) == 1
    assert str(file) in capsys.readouterr().err
