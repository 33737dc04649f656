// Protobuf messages as Python dictionaries.
#pragma once

#include <google/protobuf/message.h>
#include <nanobind/nanobind.h>

namespace ballast {

// Fields by name: integers and floats as they are, enums by their value's name without the enum's ("APPLIED"), repeated
// fields as lists, maps as dicts. An optional field or a message that is not set is None.
nanobind::dict ToDict(const google::protobuf::Message& message);

}  // namespace ballast
