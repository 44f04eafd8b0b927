"""What a lane of links asks and tells the node that it reads."""
