"""Class tables that tests share."""

from segpipe.data.catalog import published

CAMVID = published("camvid").table.classes
