#include "proto/known_fields.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/unknown_field_set.h>

#include <vector>

#include "absl/strings/str_cat.h"

namespace ballast {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

std::optional<std::string> Within(const Message& message, const std::string& name) {
  const auto unknown = UnknownFieldOf(message);
  return unknown ? std::optional(absl::StrCat(name, ".", *unknown)) : std::nullopt;
}

}  // namespace

std::optional<std::string> UnknownFieldOf(const Message& message) {
  const auto& values = *message.GetReflection();
  if (const auto& unknown = values.GetUnknownFields(message); !unknown.empty()) {
    return absl::StrCat(unknown.field(0).number());
  }
  std::vector<const FieldDescriptor*> fields;
  values.ListFields(message, &fields);
  for (const FieldDescriptor* field : fields) {
    if (field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) continue;
    const int size = field->is_repeated() ? values.FieldSize(message, field) : 0;
    for (int i = 0; i < size; ++i) {
      const auto unknown =
          Within(values.GetRepeatedMessage(message, field, i), absl::StrCat(field->name(), "[", i, "]"));
      if (unknown) return unknown;
    }
    if (field->is_repeated()) continue;
    if (const auto unknown = Within(values.GetMessage(message, field), std::string(field->name()))) return unknown;
  }
  return std::nullopt;
}

absl::Status CheckKnownFields(const Message& request) {
  const auto unknown = UnknownFieldOf(request);
  if (!unknown) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "this daemon does not know the field ", *unknown, " of ", std::string(request.GetDescriptor()->name()),
      ": the client is of a later version. Install that version of the daemon, or do without what the "
      "client asks for there"));
}

}  // namespace ballast
