#include "proto/utf8.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace ballast {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

// What a character with this first byte looks like (Unicode 15, table 3-7): its length, and the range of its second
// byte, which is what excludes overlong forms, surrogates and code points beyond U+10FFFF.
struct Form {
  size_t length = 0;  // 0: not a first byte
  uint8_t second_min = 0x80, second_max = 0xBF;
};

Form FormOf(uint8_t first) {
  if (first < 0x80) return {1};
  if (first >= 0xC2 && first <= 0xDF) return {2};
  if (first == 0xE0) return {3, 0xA0, 0xBF};
  if (first == 0xED) return {3, 0x80, 0x9F};
  if (first >= 0xE1 && first <= 0xEF) return {3};
  if (first == 0xF0) return {4, 0x90, 0xBF};
  if (first >= 0xF1 && first <= 0xF3) return {4};
  if (first == 0xF4) return {4, 0x80, 0x8F};
  return {};
}

bool IsUtf8(std::string_view bytes) {
  while (!bytes.empty()) {
    const size_t length = Utf8CharacterLength(bytes);
    if (length == 0) return false;
    bytes.remove_prefix(length);
  }
  return true;
}

absl::Status CheckText(const Message& message, const std::string& path);

// Of the i-th value of a field; i is -1 where it has one.
absl::Status CheckValue(const Message& message, const FieldDescriptor* field, int i, const std::string& path) {
  const auto& values = *message.GetReflection();
  const bool repeated = i >= 0;
  if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
    return CheckText(repeated ? values.GetRepeatedMessage(message, field, i) : values.GetMessage(message, field),
                     absl::StrCat(path, "."));
  }
  std::string kept;
  const std::string& text = repeated ? values.GetRepeatedStringReference(message, field, i, &kept)
                                     : values.GetStringReference(message, field, &kept);
  if (IsUtf8(text)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(path, " is '", absl::CHexEscape(text.substr(0, 80)), "', which is not valid UTF-8"));
}

absl::Status CheckText(const Message& message, const std::string& path) {
  std::vector<const FieldDescriptor*> fields;
  message.GetReflection()->ListFields(message, &fields);
  for (const FieldDescriptor* field : fields) {
    const bool text = field->type() == FieldDescriptor::TYPE_STRING;
    if (!text && field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) continue;
    const std::string name = absl::StrCat(path, field->name());
    const int size = field->is_repeated() ? message.GetReflection()->FieldSize(message, field) : 0;
    for (int i = 0; i < size; ++i) {
      if (auto s = CheckValue(message, field, i, absl::StrCat(name, "[", i, "]")); !s.ok()) return s;
    }
    if (field->is_repeated()) continue;
    if (auto s = CheckValue(message, field, -1, name); !s.ok()) return s;
  }
  return absl::OkStatus();
}

}  // namespace

size_t Utf8CharacterLength(std::string_view bytes) {
  const Form form = FormOf(static_cast<uint8_t>(bytes[0]));
  if (form.length > bytes.size()) return 0;
  for (size_t i = 1; i < form.length; ++i) {
    const auto byte = static_cast<uint8_t>(bytes[i]);
    const uint8_t min = i == 1 ? form.second_min : 0x80;
    const uint8_t max = i == 1 ? form.second_max : 0xBF;
    if (byte < min || byte > max) return 0;
  }
  return form.length;
}

char32_t CodePointOf(std::string_view character) {
  constexpr uint8_t kOfFirst[] = {0, 0x7F, 0x1F, 0x0F, 0x07};  // by the character's length
  char32_t code_point = static_cast<uint8_t>(character[0]) & kOfFirst[character.size()];
  for (const char byte : character.substr(1)) code_point = code_point << 6 | (static_cast<uint8_t>(byte) & 0x3F);
  return code_point;
}

bool IsUnseen(char32_t code_point) {
  struct Range {
    char32_t first, last;
  };
  constexpr Range kUnseen[] = {{0, 0x1F},        {0x7F, 0x9F},     {0xAD, 0xAD},      {0x61C, 0x61C},
                               {0x180E, 0x180E}, {0x200B, 0x200F}, {0x2028, 0x202E},  {0x2060, 0x206F},
                               {0xFEFF, 0xFEFF}, {0xFFF9, 0xFFFB}, {0xE0000, 0xE007F}};
  return std::any_of(std::begin(kUnseen), std::end(kUnseen),
                     [&](const Range& range) { return code_point >= range.first && code_point <= range.last; });
}

std::string JsonEscape(char32_t code_point) {
  const auto unit = [](uint32_t value) { return absl::StrCat("\\u", absl::Hex(value, absl::kZeroPad4)); };
  if (code_point == U'\n') return "\\n";
  if (code_point <= 0xFFFF) return unit(code_point);
  const uint32_t beyond = code_point - 0x10000;
  return unit(0xD800 + (beyond >> 10)) + unit(0xDC00 + (beyond & 0x3FF));
}

absl::Status CheckText(const Message& message) { return CheckText(message, ""); }

}  // namespace ballast
