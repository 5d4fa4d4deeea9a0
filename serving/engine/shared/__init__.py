"""What the engines of every device share."""
