"""Whether a finished run is what it says it is: its evidence read again, and parts of it trained again."""
