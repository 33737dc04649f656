#include "server/config/config_file.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "yaml-cpp/yaml.h"

#include "ballast/v1/config.pb.h"
#include "server/base/status_macros.h"
#include "server/config/config_schema.h"

namespace ballast {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;

std::vector<std::string> FieldNames(const Descriptor& section) {
  std::vector<std::string> names;
  for (int i = 0; i < section.field_count(); ++i) names.push_back(section.field(i)->name());
  return names;
}

// Walks a YAML tree along the schema. yaml-cpp's accessors throw on misuse: only ParseConfigText calls this.
class FileReader {
 public:
  explicit FileReader(const std::string& file) : file_(file) {}

  absl::Status ReadSection(const YAML::Node& node, const Descriptor& section, const std::string& prefix) {
    std::map<std::string, std::string> seen;  // key: where
    for (const auto& entry : node) RETURN_IF_ERROR(ReadEntry(entry.first, entry.second, section, prefix, &seen));
    return absl::OkStatus();
  }

  std::string Where(const YAML::Mark& mark) const { return absl::StrCat(file_, ":", mark.line + 1); }
  std::vector<FileValue> values;

 private:
  absl::Status ReadEntry(const YAML::Node& key, const YAML::Node& value, const Descriptor& section,
                         const std::string& prefix, std::map<std::string, std::string>* seen) {
    const std::string where = Where(key.Mark());
    if (!key.IsScalar()) return absl::FailedPreconditionError(absl::StrCat(where, ": a key must be a plain word"));
    const std::string path = absl::StrCat(prefix, key.Scalar());
    const FieldDescriptor* field = section.FindFieldByName(key.Scalar());
    if (field == nullptr) {
      return absl::FailedPreconditionError(
          absl::StrCat(where, ": unknown key '", path, "'", ValidNames(key.Scalar(), FieldNames(section))));
    }
    if (const auto [first, added] = seen->emplace(key.Scalar(), where); !added) {
      return absl::FailedPreconditionError(
          absl::StrCat(where, ": key '", path, "' comes twice, first at ", first->second, "; remove one"));
    }
    return field->message_type() != nullptr             ? EnterSection({path, "", where}, *field->message_type(), value)
           : field->is_repeated() && value.IsSequence() ? AddList({path, "", where}, value)
                                                        : AddValue({path, "", where}, value);
  }

  absl::Status EnterSection(const FileValue& at, const Descriptor& section, const YAML::Node& value) {
    if (value.IsNull()) return absl::OkStatus();
    if (value.IsMap()) return ReadSection(value, section, absl::StrCat(at.path, "."));
    return absl::FailedPreconditionError(
        absl::StrCat(at.where, ": '", at.path,
                     "' is a section; indent its keys under it: ", absl::StrJoin(FieldNames(section), ", ")));
  }

  absl::Status AddValue(FileValue at, const YAML::Node& value) {
    if (!value.IsScalar()) {
      const char* got = value.IsNull() ? "nothing" : value.IsMap() ? "a section" : "a list";
      return absl::FailedPreconditionError(absl::StrCat(at.where, ": '", at.path, "' wants one value and got ", got));
    }
    at.text = value.Scalar();
    values.push_back(std::move(at));
    return absl::OkStatus();
  }

  // Items stay as they are written, empty ones, too: an argument of a command may be.
  absl::Status AddList(FileValue at, const YAML::Node& list) {
    std::vector<std::string> items;
    for (const YAML::Node& item : list) {
      if (!item.IsScalar()) {
        return absl::FailedPreconditionError(
            absl::StrCat(Where(item.Mark()), ": an item of '", at.path, "' must be a plain word"));
      }
      items.push_back(item.Scalar());
    }
    at.items = std::move(items);
    values.push_back(std::move(at));
    return absl::OkStatus();
  }

  const std::string file_;
};

}  // namespace

absl::StatusOr<std::vector<FileValue>> ParseConfigText(const std::string& text, const std::string& file) {
  FileReader reader(file);
  try {
    const std::vector<YAML::Node> documents = YAML::LoadAll(text);
    if (documents.size() > 1) {
      return absl::FailedPreconditionError(
          absl::StrCat(reader.Where(documents[1].Mark()),
                       ": a second YAML document starts here; the configuration is one document"));
    }
    if (documents.empty() || documents[0].IsNull()) return reader.values;
    if (!documents[0].IsMap()) {
      return absl::FailedPreconditionError(absl::StrCat(reader.Where(documents[0].Mark()),
                                                        ": wanted 'key: value' lines",
                                                        ValidNames("", FieldNames(*v1::DaemonConfig::descriptor()))));
    }
    RETURN_IF_ERROR(reader.ReadSection(documents[0], *v1::DaemonConfig::descriptor(), ""));
  } catch (const YAML::Exception& e) {
    return absl::FailedPreconditionError(absl::StrCat(reader.Where(e.mark), ": not YAML: ", e.msg));
  }
  return reader.values;
}

absl::StatusOr<std::vector<FileValue>> ReadConfigFile(const std::string& file) {
  std::ifstream stream(file, std::ios::binary);
  std::string text;
  std::getline(stream, text, '\0');
  if (!stream.is_open() || stream.bad()) {
    return absl::FailedPreconditionError(
        absl::StrCat(file, ": cannot be read: ", std::strerror(errno), "; name a readable file with --config"));
  }
  if (!stream.eof()) {
    const auto line = 1 + std::count(text.begin(), text.end(), '\n');
    return absl::FailedPreconditionError(
        absl::StrCat(file, ":", line, ": has a NUL byte, which no text has; write the file anew"));
  }
  return ParseConfigText(text, file);
}

}  // namespace ballast
