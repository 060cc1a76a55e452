"""How the processes start, stop, meet faults and report themselves."""
