"""What a planner decides, one decision a file."""
