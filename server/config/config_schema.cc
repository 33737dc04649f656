#include "server/config/config_schema.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>

#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "ballast_config_schema.h"
#include "google/protobuf/descriptor.pb.h"

namespace ballast {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

struct Unit {
  absl::string_view name;
  uint64_t bytes;
};
// Longest names first where one ends in another.
constexpr std::array<Unit, 9> kUnits = {{{"KiB", 1ULL << 10},
                                         {"MiB", 1ULL << 20},
                                         {"GiB", 1ULL << 30},
                                         {"TiB", 1ULL << 40},
                                         {"KB", 1'000},
                                         {"MB", 1'000'000},
                                         {"GB", 1'000'000'000},
                                         {"TB", 1'000'000'000'000},
                                         {"B", 1}}};

ConfigKey::Kind KindOf(const FieldDescriptor& field) {
  if (field.is_repeated()) return ConfigKey::Kind::kList;  // of text: no key is another list
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_BOOL:
      return ConfigKey::Kind::kSwitch;
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return ConfigKey::Kind::kSeconds;
    case FieldDescriptor::CPPTYPE_UINT64:
      return ConfigKey::Kind::kBytes;
    case FieldDescriptor::CPPTYPE_UINT32:
      return absl::EndsWith(field.name(), "_bytes") ? ConfigKey::Kind::kBytes : ConfigKey::Kind::kCount;
    default:
      return ConfigKey::Kind::kText;
  }
}

// Comments are not in the generated code; the build embeds the schema with them.
class Docs {
 public:
  Docs() {
    google::protobuf::FileDescriptorSet files;
    files.ParseFromArray(kConfigSchema, static_cast<int>(sizeof(kConfigSchema)));
    for (const auto& file : files.file()) pool_.BuildFile(file);
  }
  std::string Of(const FieldDescriptor& field) const {
    google::protobuf::SourceLocation location;
    const FieldDescriptor* documented = pool_.FindFieldByName(field.full_name());
    if (documented == nullptr || !documented->GetSourceLocation(&location)) return "";
    std::string doc = location.leading_comments + location.trailing_comments;
    absl::StripAsciiWhitespace(&doc);
    return absl::StrReplaceAll(doc, {{"\n", ""}});
  }

 private:
  google::protobuf::DescriptorPool pool_;
};

void AddKeys(const Descriptor& section, const ConfigKey& prefix, const Docs& docs, std::vector<ConfigKey>* keys) {
  for (int i = 0; i < section.field_count(); ++i) {
    const FieldDescriptor* field = section.field(i);
    ConfigKey key = prefix;
    absl::StrAppend(&key.path, prefix.path.empty() ? "" : ".", field->name());
    key.fields.push_back(field);
    if (field->message_type() != nullptr) {
      AddKeys(*field->message_type(), key, docs, keys);
      continue;
    }
    key.kind = KindOf(*field);
    key.doc = docs.Of(*field);
    keys->push_back(std::move(key));
  }
}

std::string Normal(absl::string_view spelling) {
  return absl::StrReplaceAll(absl::AsciiStrToLower(spelling), {{".", "_"}, {"-", "_"}});
}

absl::StatusOr<uint64_t> ReadCount(absl::string_view text) {
  uint64_t value = 0;
  if (absl::SimpleAtoi(text, &value) && absl::ascii_isdigit(static_cast<unsigned char>(text[0]))) return value;
  return absl::InvalidArgumentError(absl::StrCat("'", text, "' is not a whole number"));
}

absl::StatusOr<uint64_t> ReadBytes(absl::string_view text) {
  absl::string_view digits = text;
  uint64_t unit_bytes = 1;
  for (const Unit& unit : kUnits) {
    if (!absl::EndsWith(text, unit.name)) continue;
    digits = absl::StripTrailingAsciiWhitespace(text.substr(0, text.size() - unit.name.size()));
    unit_bytes = unit.bytes;
    break;
  }
  const absl::StatusOr<uint64_t> count = ReadCount(digits);
  if (!count.ok() || *count > std::numeric_limits<uint64_t>::max() / unit_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("'", text, "' is not a size; write it as 64MiB, 64MB or bytes"));
  }
  return *count * unit_bytes;
}

absl::StatusOr<double> ReadSeconds(absl::string_view text) {
  absl::Duration duration;
  if (absl::ParseDuration(text, &duration) && duration >= absl::ZeroDuration() && duration < absl::InfiniteDuration()) {
    return absl::ToDoubleSeconds(duration);
  }
  return absl::InvalidArgumentError(absl::StrCat("'", text, "' is not a duration; write it as 30s or 500ms"));
}

absl::StatusOr<bool> ReadSwitch(absl::string_view text) {
  if (text == "true" || text == "on") return true;
  if (text == "false" || text == "off") return false;
  return absl::InvalidArgumentError(absl::StrCat("'", text, "' is neither true nor false"));
}

// The section message that holds the key's field.
Message* SectionOf(const ConfigKey& key, Message* message) {
  for (size_t i = 0; i + 1 < key.fields.size(); ++i) {
    message = message->GetReflection()->MutableMessage(message, key.fields[i]);
  }
  return message;
}

absl::Status SetNumber(const FieldDescriptor* field, absl::StatusOr<uint64_t> value, Message* section) {
  if (!value.ok()) return value.status();
  const auto* reflection = section->GetReflection();
  if (field->cpp_type() == FieldDescriptor::CPPTYPE_UINT64) {
    reflection->SetUInt64(section, field, *value);
    return absl::OkStatus();
  }
  if (*value > std::numeric_limits<uint32_t>::max()) {
    return absl::InvalidArgumentError(absl::StrCat(*value, " is more than this key can hold (4294967295)"));
  }
  reflection->SetUInt32(section, field, static_cast<uint32_t>(*value));
  return absl::OkStatus();
}

// In place of what it was: a list of a stronger source is the whole list.
void SetList(const FieldDescriptor* field, absl::string_view text, Message* section) {
  const auto* reflection = section->GetReflection();
  reflection->ClearField(section, field);
  for (const absl::string_view item : absl::StrSplit(text, ',')) {
    const std::string stripped(absl::StripAsciiWhitespace(item));
    if (!stripped.empty()) reflection->AddString(section, field, stripped);
  }
}

std::string ListText(const FieldDescriptor* field, const Message& section) {
  std::vector<std::string> items;
  for (int i = 0; i < section.GetReflection()->FieldSize(section, field); ++i) {
    items.push_back(section.GetReflection()->GetRepeatedString(section, field, i));
  }
  return absl::StrJoin(items, ",");
}

std::string BytesText(uint64_t bytes) {
  for (auto unit = kUnits.begin() + 3;; --unit) {  // TiB down to KiB
    if (bytes > 0 && bytes % unit->bytes == 0) return absl::StrCat(bytes / unit->bytes, unit->name);
    if (unit == kUnits.begin()) return absl::StrCat(bytes);
  }
}

// Levenshtein's distance, one row at a time.
size_t EditDistance(absl::string_view a, absl::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = row[0]++;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t substituted = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({substituted, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

}  // namespace

std::string ConfigKey::environment() const { return absl::StrCat("BALLAST_", absl::AsciiStrToUpper(Normal(path))); }

absl::string_view ConfigKey::placeholder() const {
  constexpr std::array<absl::string_view, 6> kPlaceholders = {"TEXT", "true|false", "N", "BYTES", "DURATION", "LIST"};
  return kPlaceholders[static_cast<size_t>(kind)];
}

const std::vector<ConfigKey>& ConfigKeys() {
  static const auto& keys = *[] {
    auto* all = new std::vector<ConfigKey>;
    AddKeys(*v1::DaemonConfig::descriptor(), {}, Docs(), all);
    return all;
  }();
  return keys;
}

const ConfigKey* FindConfigKey(absl::string_view spelling) {
  for (const ConfigKey& key : ConfigKeys()) {
    if (Normal(key.path) == Normal(spelling)) return &key;
  }
  return nullptr;
}

absl::Status SetConfigValue(const ConfigKey& key, absl::string_view text, v1::DaemonConfig* config) {
  const FieldDescriptor* field = key.fields.back();
  Message* section = SectionOf(key, config);
  const auto* reflection = section->GetReflection();
  switch (key.kind) {
    case ConfigKey::Kind::kText:
      reflection->SetString(section, field, std::string(text));
      return absl::OkStatus();
    case ConfigKey::Kind::kCount:
      return SetNumber(field, ReadCount(text), section);
    case ConfigKey::Kind::kBytes:
      return SetNumber(field, ReadBytes(text), section);
    case ConfigKey::Kind::kSeconds: {
      const absl::StatusOr<double> seconds = ReadSeconds(text);
      if (seconds.ok()) reflection->SetDouble(section, field, *seconds);
      return seconds.status();
    }
    case ConfigKey::Kind::kSwitch: {
      const absl::StatusOr<bool> on = ReadSwitch(text);
      if (on.ok()) reflection->SetBool(section, field, *on);
      return on.status();
    }
    case ConfigKey::Kind::kList:
      SetList(field, text, section);
      return absl::OkStatus();
  }
  return absl::InternalError("unreachable");
}

std::string ConfigValueText(const ConfigKey& key, const v1::DaemonConfig& config) {
  const FieldDescriptor* field = key.fields.back();
  const Message* section = &config;
  for (size_t i = 0; i + 1 < key.fields.size(); ++i) {
    section = &section->GetReflection()->GetMessage(*section, key.fields[i]);
  }
  if (key.kind == ConfigKey::Kind::kList) return ListText(field, *section);
  const auto* reflection = section->GetReflection();
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_BOOL:
      return reflection->GetBool(*section, field) ? "true" : "false";
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return absl::FormatDuration(absl::Seconds(reflection->GetDouble(*section, field)));
    case FieldDescriptor::CPPTYPE_UINT64:
      return BytesText(reflection->GetUInt64(*section, field));
    case FieldDescriptor::CPPTYPE_UINT32: {
      const uint32_t value = reflection->GetUInt32(*section, field);
      return key.kind == ConfigKey::Kind::kBytes ? BytesText(value) : absl::StrCat(value);
    }
    default:
      return reflection->GetString(*section, field);
  }
}

std::string DidYouMean(absl::string_view got, const std::vector<std::string>& names) {
  const auto distance = [&](const std::string& name) { return EditDistance(got, name); };
  const auto nearest = std::min_element(names.begin(), names.end(), [&](const std::string& a, const std::string& b) {
    return distance(a) < distance(b);
  });
  const bool close = nearest != names.end() && distance(*nearest) <= std::max<size_t>(2, got.size() / 4);
  return close ? absl::StrCat("; did you mean '", *nearest, "'?") : "";
}

std::string ValidNames(absl::string_view got, const std::vector<std::string>& names) {
  const std::string near = DidYouMean(got, names);
  return absl::StrCat(near, near.empty() ? "; " : " ", "valid: ", absl::StrJoin(names, ", "));
}

}  // namespace ballast
