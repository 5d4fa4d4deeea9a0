"""What a policy gains over others, found out while it serves."""
