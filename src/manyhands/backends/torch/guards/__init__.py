"""What a trace depends on outside its arguments, checked before every replay."""
