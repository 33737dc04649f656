// What is wrong with a file of a checkpoint: DATA_LOSS, for people and in the metrics' words.
#pragma once

#include <google/protobuf/message.h>

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace ballast {

// Of a status that said why a checkpoint could not be read: checksum, truncated, missing, manifest, version; or other,
// such as an input/output error.
std::string_view DamageOf(const absl::Status& status);

// DATA_LOSS: "PATH is damaged: HOW". damage: one of those words.
absl::Status Damaged(const std::string& path, absl::string_view damage, const std::string& how);
// The status, which then has that DamageOf.
absl::Status WithDamage(absl::Status status, absl::string_view damage);

// What a later version has written is refused, since it may change what all the rest means: FAILED_PRECONDITION, whose
// DamageOf is version. `why` the file is such a one, behind its name:
absl::Status OfLaterVersion(const std::string& file, absl::string_view why);
// FromJson of a file whose bytes are those that were written.
absl::Status ReadJson(absl::string_view json, const std::string& file, google::protobuf::Message* message);
// Of a message that was read from such bytes of the file.
absl::Status CheckVersion(const google::protobuf::Message& message, const std::string& file);

}  // namespace ballast
