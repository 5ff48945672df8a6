"""Between protobuf messages and plain values, with every range that types.proto states."""
