#include "proto/checkpoint/manifest.h"

#include <google/protobuf/util/json_util.h>

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "proto/checkpoint/file_digest.h"

namespace ballast {
namespace {

namespace json = google::protobuf::util;

// A name that leads nowhere but into the folder.
bool IsPlainName(absl::string_view name) {
  return !name.empty() && name.size() <= 255 && name[0] != '.' && std::all_of(name.begin(), name.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' || c == '-';
  });
}

bool IsSha256(absl::string_view hex) {
  return hex.size() == 64 && std::all_of(hex.begin(), hex.end(), [](char c) {
           return absl::ascii_isdigit(static_cast<unsigned char>(c)) || (c >= 'a' && c <= 'f');
         });
}

// What is wrong with an entry; empty: nothing.
std::string WrongWith(const v1::CheckpointFile& file, absl::string_view name_before) {
  if (!IsPlainName(file.name())) return "its name is not a plain file name";
  if (file.name() == kManifestName || file.name() == kSumsName) return "a manifest does not have that file";
  if (file.name() <= name_before) return "the files are not in the order of their names";
  if (!IsSha256(file.sha256())) return "its sha256 is not 64 lower-case hexadecimal digits";
  const uint64_t blocks = file.bytes() / kChecksumBlock + (file.bytes() % kChecksumBlock > 0 ? 1 : 0);
  if (static_cast<uint64_t>(file.crc32c_size()) != blocks) {
    return absl::StrCat("it has ", file.crc32c_size(), " checksums for ", blocks, " MiB");
  }
  return "";
}

absl::Status CheckFiles(const v1::CheckpointManifest& manifest, const std::string& path) {
  absl::string_view before;
  for (const v1::CheckpointFile& file : manifest.files()) {
    if (const std::string wrong = WrongWith(file, before); !wrong.empty()) {
      return absl::DataLossError(absl::StrCat(path, " is damaged: of file '", file.name(), "': ", wrong));
    }
    before = file.name();
  }
  for (const absl::string_view name : {kSpecName, kRunName}) {
    if (FindFile(manifest, name) == nullptr) {
      return absl::DataLossError(absl::StrCat(path, " is damaged: it lists no ", name));
    }
  }
  return absl::OkStatus();
}

absl::Status Parse(absl::string_view text, const std::string& file, const json::JsonParseOptions& options,
                   google::protobuf::Message* message) {
  const auto status = json::JsonStringToMessage({text.data(), text.size()}, message, options);
  if (status.ok()) return absl::OkStatus();
  std::string why(status.message().data(), status.message().size());
  // It quotes the text, which may be no text at all; messages and logs are UTF-8.
  const auto is_ascii = [](char c) { return absl::ascii_isascii(static_cast<unsigned char>(c)); };
  if (!std::all_of(why.begin(), why.end(), is_ascii)) why = absl::CHexEscape(why);
  return absl::DataLossError(absl::StrCat(file, " is damaged: ", why));
}

json::JsonParseOptions IgnoringMore() {
  json::JsonParseOptions options;
  options.ignore_unknown_fields = true;
  return options;
}

}  // namespace

std::string ToJson(const google::protobuf::Message& message) {
  std::string text;
  const auto status = json::MessageToJsonString(message, &text);
  // Nothing in these messages can fail to be written: no Any, no enum out of range.
  return status.ok() ? text : "";
}

absl::Status FromJson(absl::string_view text, const std::string& file, google::protobuf::Message* message) {
  const absl::Status read = Parse(text, file, {}, message);
  if (read.ok() || !Parse(text, file, IgnoringMore(), message).ok()) return read;
  return absl::FailedPreconditionError(absl::StrCat(
      file, " says what this version does not know, since a later one wrote it: use that, whose number is in ",
      kManifestName, " beside it, or a later one"));
}

std::string SumsText(absl::string_view manifest_text, const v1::CheckpointManifest& manifest) {
  std::string text = absl::StrCat(DigestOf("", manifest_text).sha256(), "  ", kManifestName, "\n");
  for (const v1::CheckpointFile& file : manifest.files()) {
    absl::StrAppend(&text, file.sha256(), "  ", file.name(), "\n");
  }
  return text;
}

absl::StatusOr<v1::CheckpointManifest> ReadManifest(absl::string_view manifest_text, absl::string_view sums_text,
                                                    const std::string& folder) {
  const std::string path = absl::StrCat(folder, "/", kManifestName), sums_path = absl::StrCat(folder, "/", kSumsName);
  const std::string first_line = absl::StrCat(DigestOf("", manifest_text).sha256(), "  ", kManifestName, "\n");
  if (sums_text.substr(0, first_line.size()) != first_line) {
    return absl::DataLossError(absl::StrCat(path, " or ", sums_path, " is damaged: the SHA-256 of the first, ",
                                            first_line.substr(0, 64), ", is not what the second says"));
  }
  v1::CheckpointManifest manifest;
  // A later format may have more fields, and is to be refused by its number.
  if (auto s = Parse(manifest_text, path, IgnoringMore(), &manifest); !s.ok()) return s;
  if (manifest.format() != kCheckpointFormat) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, " is of format ", manifest.format(), ", written by version ", manifest.version(),
                     "; this version reads format ", kCheckpointFormat, ": use a later one"));
  }
  if (auto s = CheckFiles(manifest, path); !s.ok()) return s;
  if (sums_text == SumsText(manifest_text, manifest)) return manifest;
  return absl::DataLossError(absl::StrCat(sums_path, " is damaged: it is not what ", kManifestName, " leads to"));
}

const v1::CheckpointFile* FindFile(const v1::CheckpointManifest& manifest, absl::string_view name) {
  const auto found = std::find_if(manifest.files().begin(), manifest.files().end(),
                                  [&](const v1::CheckpointFile& file) { return file.name() == name; });
  return found == manifest.files().end() ? nullptr : &*found;
}

}  // namespace ballast
