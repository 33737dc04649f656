// One checkpoint, read back: its manifest first, and then its files, of which no byte is given out that has not the
// checksum that the manifest says.
//
//   ASSIGN_OR_RETURN(const CheckpointReader checkpoint, CheckpointReader::Open(fs, path));
//   ASSIGN_OR_RETURN(std::string spec, checkpoint.ReadText(kSpecName));
//   RETURN_IF_ERROR(checkpoint.ReadInto("model-00001-of-00001.safetensors", pieces, buffer));
//
// DATA_LOSS names the file, and the MiB of it, that is damaged, missing, or shorter or longer than it was.
// FAILED_PRECONDITION: a later version wrote it. Thread-safe, with a buffer for each thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "ballast/v1/checkpoint.pb.h"
#include "server/storage/file_writer.h"
#include "server/storage/fs.h"

namespace ballast {

// What is wrong with a checkpoint that could not be read, of the status that said so, in the metrics' words: checksum,
// truncated, missing, manifest, version; or other, such as an input/output error.
std::string_view DamageOf(const absl::Status& status);

class CheckpointReader {
 public:
  static absl::StatusOr<CheckpointReader> Open(Fs* fs, const std::string& folder);

  const v1::CheckpointManifest& manifest() const { return manifest_; }
  const std::string& folder() const { return folder_; }
  bool Has(absl::string_view name) const;
  // A small file as a whole.
  absl::StatusOr<std::string> ReadText(absl::string_view name) const;
  // Into the pieces, one after another. INVALID_ARGUMENT: they are not as long as the file; with DATA_LOSS some may be
  // written already.
  absl::Status ReadInto(absl::string_view name, const std::vector<absl::Span<std::byte>>& pieces,
                        const DiskBuffer& buffer) const;

 private:
  CheckpointReader(Fs* fs, std::string folder, v1::CheckpointManifest manifest)
      : fs_(fs), folder_(std::move(folder)), manifest_(std::move(manifest)) {}

  Fs* fs_;
  std::string folder_;
  v1::CheckpointManifest manifest_;
};

}  // namespace ballast
