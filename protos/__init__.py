"""Wire and file formats: generated protobuf modules, and their conversion to and from
values.
"""
