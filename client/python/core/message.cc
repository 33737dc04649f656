#include "client/python/core/message.h"

#include <google/protobuf/descriptor.h>
#include <nanobind/stl/string.h>

#include <cctype>
#include <string>

namespace ballast {
namespace {

namespace nb = nanobind;
using google::protobuf::EnumValueDescriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

nb::object ToStr(const std::string& text) { return nb::cast(text); }

// STEP_OUTCOME_APPLIED of StepOutcome is "APPLIED".
nb::object ToStr(const EnumValueDescriptor& value) {
  std::string prefix;
  for (const char c : value.type()->name()) {
    if (std::isupper(c) && !prefix.empty()) prefix += '_';
    prefix += static_cast<char>(std::toupper(c));
  }
  prefix += '_';
  return ToStr(value.name().starts_with(prefix) ? value.name().substr(prefix.size()) : value.name());
}

nb::object Bytes(const std::string& bytes) { return nb::bytes(bytes.data(), bytes.size()); }

// A field of one value, or the `index`th of a repeated one.
class Reader {
 public:
  Reader(const Message& message, const FieldDescriptor& field) : message_(message), field_(field) {}

  nb::object Single() const {
    const auto& get = *message_.GetReflection();
    switch (field_.cpp_type()) {
      case FieldDescriptor::CPPTYPE_INT32:
        return nb::int_(get.GetInt32(message_, &field_));
      case FieldDescriptor::CPPTYPE_INT64:
        return nb::int_(get.GetInt64(message_, &field_));
      case FieldDescriptor::CPPTYPE_UINT32:
        return nb::int_(get.GetUInt32(message_, &field_));
      case FieldDescriptor::CPPTYPE_UINT64:
        return nb::int_(get.GetUInt64(message_, &field_));
      case FieldDescriptor::CPPTYPE_DOUBLE:
        return nb::float_(get.GetDouble(message_, &field_));
      case FieldDescriptor::CPPTYPE_FLOAT:
        return nb::float_(get.GetFloat(message_, &field_));
      case FieldDescriptor::CPPTYPE_BOOL:
        return nb::bool_(get.GetBool(message_, &field_));
      case FieldDescriptor::CPPTYPE_ENUM:
        return ToStr(*get.GetEnum(message_, &field_));
      case FieldDescriptor::CPPTYPE_STRING:
        return Text(get.GetString(message_, &field_));
      case FieldDescriptor::CPPTYPE_MESSAGE:
        return ToDict(get.GetMessage(message_, &field_));
    }
    return nb::none();
  }

  nb::object Element(int index) const {
    const auto& get = *message_.GetReflection();
    switch (field_.cpp_type()) {
      case FieldDescriptor::CPPTYPE_INT32:
        return nb::int_(get.GetRepeatedInt32(message_, &field_, index));
      case FieldDescriptor::CPPTYPE_INT64:
        return nb::int_(get.GetRepeatedInt64(message_, &field_, index));
      case FieldDescriptor::CPPTYPE_UINT32:
        return nb::int_(get.GetRepeatedUInt32(message_, &field_, index));
      case FieldDescriptor::CPPTYPE_UINT64:
        return nb::int_(get.GetRepeatedUInt64(message_, &field_, index));
      case FieldDescriptor::CPPTYPE_DOUBLE:
        return nb::float_(get.GetRepeatedDouble(message_, &field_, index));
      case FieldDescriptor::CPPTYPE_FLOAT:
        return nb::float_(get.GetRepeatedFloat(message_, &field_, index));
      case FieldDescriptor::CPPTYPE_BOOL:
        return nb::bool_(get.GetRepeatedBool(message_, &field_, index));
      case FieldDescriptor::CPPTYPE_ENUM:
        return ToStr(*get.GetRepeatedEnum(message_, &field_, index));
      case FieldDescriptor::CPPTYPE_STRING:
        return Text(get.GetRepeatedString(message_, &field_, index));
      case FieldDescriptor::CPPTYPE_MESSAGE:
        return ToDict(get.GetRepeatedMessage(message_, &field_, index));
    }
    return nb::none();
  }

  nb::object Value() const {
    const auto& get = *message_.GetReflection();
    if (!field_.is_repeated()) {
      if (field_.has_presence() && !get.HasField(message_, &field_)) return nb::none();
      return Single();
    }
    nb::list list;
    for (int i = 0; i < get.FieldSize(message_, &field_); ++i) list.append(Element(i));
    if (!field_.is_map()) return list;
    nb::dict map;
    for (const nb::handle entry : list) map[entry["key"]] = entry["value"];
    return map;
  }

 private:
  nb::object Text(const std::string& text) const {
    return field_.type() == FieldDescriptor::TYPE_BYTES ? Bytes(text) : ToStr(text);
  }

  const Message& message_;
  const FieldDescriptor& field_;
};

}  // namespace

nb::dict ToDict(const Message& message) {
  nb::dict out;
  const auto& descriptor = *message.GetDescriptor();
  for (int i = 0; i < descriptor.field_count(); ++i) {
    const FieldDescriptor& field = *descriptor.field(i);
    out[field.name().c_str()] = Reader(message, field).Value();
  }
  return out;
}

}  // namespace ballast
