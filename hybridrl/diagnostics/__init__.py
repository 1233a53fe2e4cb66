"""What processes do, while they run, hang and end."""
