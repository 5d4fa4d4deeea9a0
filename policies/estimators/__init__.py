"""What a planner learns: acceptance and step costs."""
