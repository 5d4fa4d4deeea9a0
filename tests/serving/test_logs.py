"""What the logs of Ray's workers say of a start that failed."""

import os

from serving.local.logs import find_root_causes

OLDER = """\
(EngineCore pid=12) ERROR 11-29 08:00:00 [core.py:1] Traceback (most recent call last):
(EngineCore pid=12) ERROR 11-29 08:00:00 [core.py:1] ValueError: No room for the cache.
RuntimeError: Engine core initialization failed. See root cause above.
INFO: not an exception
"""


def test_the_causes_are_told_and_neither_symptoms_nor_logs_that_are_gone(tmp_path):
    for number, text in enumerate((OLDER, "OSError: disk full\n" * 3, OLDER)):
        file = tmp_path / f"worker-{9 - number}.err"
        file.write_text(text)
        os.utime(file, (number, number))
    (tmp_path / "worker-gone.err").symlink_to("nowhere")
    (tmp_path / "raylet.err").write_text("ValueError: of somebody else\n")
    causes = ["ValueError: No room for the cache.", "OSError: disk full"]
    assert find_root_causes(tmp_path) == causes
