// manifest.json and SHA256SUMS of a checkpoint's folder, as text and back (proto/CHECKPOINTS.md). What is read may be
// damaged or of another's making: everything that later code relies on is checked here.
//
// Pure functions; thread-safe.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "ballast/v1/checkpoint.pb.h"

namespace ballast {

inline constexpr uint32_t kCheckpointFormat = 1;
inline constexpr absl::string_view kManifestName = "manifest.json", kSumsName = "SHA256SUMS", kSpecName = "spec.json",
                                   kRunName = "run.json", kClientStateName = "client_state.safetensors",
                                   kIndexName = "model.safetensors.index.json";
// More than any manifest has: 70e9 parameters have 4 MB of checksums, 100,000 tensors 20 MB of names and counts.
inline constexpr uint64_t kMostManifestBytes = uint64_t{1} << 30;

// A message as the one line of JSON that the folder has.
std::string ToJson(const google::protobuf::Message& message);
// DATA_LOSS names `file`. FAILED_PRECONDITION: it has fields that this version does not know, which a later one wrote.
absl::Status FromJson(absl::string_view json, const std::string& file, google::protobuf::Message* message);

// The text of SHA256SUMS, of a manifest that is this text.
std::string SumsText(absl::string_view manifest_text, const v1::CheckpointManifest& manifest);

// Of the two files' texts. `folder` is for messages. FAILED_PRECONDITION: the format is not this version's. DATA_LOSS
// names the file and what is wrong with it.
absl::StatusOr<v1::CheckpointManifest> ReadManifest(absl::string_view manifest_text, absl::string_view sums_text,
                                                    const std::string& folder);
// The manifest's entry of this name; nullptr: it has none.
const v1::CheckpointFile* FindFile(const v1::CheckpointManifest& manifest, absl::string_view name);

}  // namespace ballast
