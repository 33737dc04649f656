#include "proto/checkpoint/safetensors_header.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace ballast {

std::string QuotedName(absl::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      absl::StrAppend(&quoted, "\\", std::string(1, c));
    } else if (static_cast<unsigned char>(c) < 0x20) {
      absl::StrAppendFormat(&quoted, "\\u%04x", static_cast<unsigned>(c));
    } else {
      quoted.push_back(c);
    }
  }
  return quoted + "\"";
}

SafetensorsHeader::SafetensorsHeader(const std::map<std::string, std::string>& metadata) {
  json_.pop_back();
  for (const auto& [key, value] : metadata) absl::StrAppend(&json_, ",", QuotedName(key), ":", QuotedName(value));
  json_ += "}";
}

void SafetensorsHeader::Add(absl::string_view name, absl::string_view dtype, absl::Span<const uint64_t> shape,
                            uint64_t bytes) {
  absl::StrAppend(&json_, ",", QuotedName(name), ":{\"dtype\":\"", dtype, "\",\"shape\":[", absl::StrJoin(shape, ","),
                  "],\"data_offsets\":[", end_, ",", end_ + bytes, "]}");
  end_ += bytes;
}

std::string SafetensorsHeader::Finish() && {
  json_ += "}";
  const uint64_t whole = (8 + json_.size() + kDataAlignment - 1) / kDataAlignment * kDataAlignment;
  json_.resize(whole - 8, ' ');
  std::string length(8, '\0');
  for (size_t i = 0; i < 8; ++i) length[i] = static_cast<char>(json_.size() >> (8 * i) & 0xff);
  return length + json_;
}

}  // namespace ballast
