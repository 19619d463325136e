"""Installs the node for `ros2 run segpipe_ros segmenter`."""

from setuptools import setup

NAME = "segpipe_ros"

setup(
    name=NAME,
    version="0.1.0",
    packages=[NAME],
    data_files=[
        ("share/ament_index/resource_index/packages", [f"resource/{NAME}"]),
        (f"share/{NAME}", ["package.xml"]),
        (f"share/{NAME}/launch", ["launch/segmenter.launch.py"]),
    ],
    install_requires=["setuptools"],
    zip_safe=True,
    maintainer="segpipe maintainers",
    maintainer_email="segpipe@example.org",
    description="Segments camera images with a network that segpipe exported.",
    license="Apache-2.0",
    entry_points={"console_scripts": [f"segmenter = {NAME}.node:main"]},
)
