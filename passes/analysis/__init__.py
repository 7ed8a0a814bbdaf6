"""What passes read off graphs; nothing here changes one."""
