"""ros2 launch segpipe_ros segmenter.launch.py folder:=EXPORT [image:=/camera/image_rect] [deadline_ms:=50.0]"""

from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import Node
from launch_ros.parameter_descriptions import ParameterValue


def generate_launch_description() -> LaunchDescription:
    """The node `segmenter` with its parameters and camera topic."""
    deadline = ParameterValue(LaunchConfiguration("deadline_ms"), value_type=float)
    return LaunchDescription(
        [
            DeclareLaunchArgument(
                "folder", description="exported folder, with SHA256SUMS"
            ),
            DeclareLaunchArgument(
                "image", default_value="/camera/image_raw", description="camera topic"
            ),
            DeclareLaunchArgument(
                "deadline_ms",
                default_value="0.0",
                description="per frame; 0.0 for no deadline",
            ),
            Node(
                package="segpipe_ros",
                executable="segmenter",
                name="segmenter",
                parameters=[
                    {"folder": LaunchConfiguration("folder"), "deadline_ms": deadline}
                ],
                remappings=[("image", LaunchConfiguration("image"))],
                output="screen",
            ),
        ]
    )
