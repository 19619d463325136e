"""An exported network as a ROS 2 node."""
