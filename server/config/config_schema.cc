#include "server/config/config_schema.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <utility>
#include <variant>

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
#include "proto/amounts.h"

#include "ballast/v1/config.pb.h"
#include "server/base/status_macros.h"

namespace ballast {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;

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

// prefix: of the section's keys.
void AddKeys(const Descriptor& section, const std::string& prefix, const Docs& docs, std::vector<ConfigKey>* keys) {
  for (int i = 0; i < section.field_count(); ++i) {
    const FieldDescriptor* field = section.field(i);
    const std::string path = absl::StrCat(prefix, field->name());
    if (field->message_type() != nullptr) {
      AddKeys(*field->message_type(), absl::StrCat(path, "."), docs, keys);
      continue;
    }
    keys->push_back({.path = path, .kind = KindOf(*field), .doc = docs.Of(*field), .row = FindConfigRow(path)});
  }
}

std::string Normal(absl::string_view spelling) {
  return absl::StrReplaceAll(absl::AsciiStrToLower(spelling), {{".", "_"}, {"-", "_"}});
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

// Each reads the text into a member of its type.
absl::Status ReadInto(std::string* member, const ConfigKey&, absl::string_view text) {
  *member = std::string(text);
  return absl::OkStatus();
}

absl::Status ReadInto(bool* member, const ConfigKey&, absl::string_view text) {
  ASSIGN_OR_RETURN(*member, ReadSwitch(text));
  return absl::OkStatus();
}

absl::Status ReadInto(double* member, const ConfigKey&, absl::string_view text) {
  ASSIGN_OR_RETURN(*member, ReadSeconds(text));
  return absl::OkStatus();
}

absl::Status ReadInto(uint64_t* member, const ConfigKey& key, absl::string_view text) {
  ASSIGN_OR_RETURN(*member, key.kind == ConfigKey::Kind::kCount ? ReadCount(text) : ReadBytes(text));
  return absl::OkStatus();
}

absl::Status ReadInto(uint32_t* member, const ConfigKey& key, absl::string_view text) {
  uint64_t value = 0;
  RETURN_IF_ERROR(ReadInto(&value, key, text));
  if (value > std::numeric_limits<uint32_t>::max()) {
    return absl::InvalidArgumentError(absl::StrCat(value, " is more than this key can hold (4294967295)"));
  }
  *member = static_cast<uint32_t>(value);
  return absl::OkStatus();
}

// In place of what it was: a list of a stronger source is the whole list.
absl::Status ReadInto(std::vector<std::string>* member, const ConfigKey&, absl::string_view text) {
  *member = SplitList(text);
  if (std::find(member->begin(), member->end(), "") == member->end()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("'", text, "' has an empty item; leave a comma out, or write [a, \"\"] in the file"));
}

std::string TextOf(const ConfigKey&, const std::string& value) { return value; }
std::string TextOf(const ConfigKey&, bool value) { return value ? "true" : "false"; }
std::string TextOf(const ConfigKey&, double value) { return absl::FormatDuration(absl::Seconds(value)); }
std::string TextOf(const ConfigKey& key, uint64_t value) {
  return key.kind == ConfigKey::Kind::kCount ? absl::StrCat(value) : BytesText(value);
}
std::string TextOf(const ConfigKey& key, uint32_t value) { return TextOf(key, uint64_t{value}); }
std::string TextOf(const ConfigKey&, const std::vector<std::string>& value) { return JoinList(value); }

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

std::string ConfigKey::environment() const {
  // Without it they would be the clients' variables (config.proto).
  const char* const owner = absl::StartsWith(path, "tls.") ? "DAEMON_" : "";
  return absl::StrCat("BALLAST_", owner, absl::AsciiStrToUpper(Normal(path)));
}

absl::string_view ConfigKey::placeholder() const {
  constexpr std::array<absl::string_view, 6> kPlaceholders = {"TEXT", "true|false", "N", "BYTES", "DURATION", "LIST"};
  return kPlaceholders[static_cast<size_t>(kind)];
}

const std::vector<ConfigKey>& ConfigKeys() {
  static const auto& keys = *[] {
    auto* all = new std::vector<ConfigKey>;
    AddKeys(*v1::DaemonConfig::descriptor(), "", Docs(), all);
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

absl::Status SetConfigValue(const ConfigKey& key, absl::string_view text, Config* config) {
  if (key.row == nullptr) return absl::InternalError("config_keys.cc has no row for this key");
  return std::visit([&](auto* member) { return ReadInto(member, key, text); }, key.row->member(*config));
}

absl::Status SetConfigList(const ConfigKey& key, std::vector<std::string> items, Config* config) {
  if (key.row == nullptr) return absl::InternalError("config_keys.cc has no row for this key");
  const ConfigMember member = key.row->member(*config);
  auto* const* list = std::get_if<std::vector<std::string>*>(&member);
  if (list == nullptr) return absl::InternalError("a key that is no list was given one");
  **list = std::move(items);
  return absl::OkStatus();
}

std::string ConfigValueText(const ConfigKey& key, const Config& config) {
  if (key.row == nullptr) return "";
  Config copy = config;  // a row's member is one that can be set
  return std::visit([&](const auto* member) { return TextOf(key, *member); }, key.row->member(copy));
}

std::vector<std::string> ConfigList(const ConfigKey& key, const Config& config) {
  if (key.row == nullptr) return {};
  Config copy = config;
  const ConfigMember member = key.row->member(copy);
  auto* const* list = std::get_if<std::vector<std::string>*>(&member);
  return list == nullptr ? std::vector<std::string>() : **list;
}

std::vector<std::string> SplitList(absl::string_view text) {
  std::vector<std::string> items;
  if (absl::StripAsciiWhitespace(text).empty()) return items;
  std::string item;
  const auto end_item = [&] {
    absl::StripAsciiWhitespace(&item);
    items.push_back(item);
    item.clear();
  };
  for (size_t i = 0; i < text.size(); ++i) {
    const bool escapes = text[i] == '\\' && i + 1 < text.size() && (text[i + 1] == ',' || text[i + 1] == '\\');
    if (text[i] == ',') {
      end_item();
    } else {
      item.push_back(text[escapes ? ++i : i]);
    }
  }
  end_item();
  return items;
}

std::string JoinList(const std::vector<std::string>& items) {
  return absl::StrJoin(items, ",", [](std::string* out, const std::string& item) {
    absl::StrAppend(out, absl::StrReplaceAll(item, {{"\\", "\\\\"}, {",", "\\,"}}));
  });
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
