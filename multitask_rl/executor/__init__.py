"""Running engines and rewards in other processes and on other machines."""
