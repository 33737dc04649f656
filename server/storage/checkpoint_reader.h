// One checkpoint, read back: its manifest first, and then its files, of which no byte is given out that has not the
// checksum that the manifest says.
//
//   ASSIGN_OR_RETURN(const CheckpointReader checkpoint, CheckpointReader::Open(fs, path));
//   ASSIGN_OR_RETURN(std::string spec, checkpoint.ReadText(kSpecName));
//   ASSIGN_OR_RETURN(FileReader file, checkpoint.OpenFile("model-00001-of-00001.safetensors", pieces));
//
// DATA_LOSS names the file, and the MiB of it, that is damaged, missing, or shorter or longer than it was.
// FAILED_PRECONDITION: a later version wrote it. Thread-safe.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "ballast/v1/checkpoint.pb.h"
#include "server/storage/file_reader.h"
#include "server/storage/fs.h"

namespace ballast {

class CheckpointReader {
 public:
  static absl::StatusOr<CheckpointReader> Open(Fs* fs, const std::string& folder);

  const v1::CheckpointManifest& manifest() const { return manifest_; }
  const std::string& folder() const { return folder_; }
  bool Has(absl::string_view name) const;
  // A small file as a whole.
  absl::StatusOr<std::string> ReadText(absl::string_view name) const;
  // To be read into the pieces, as FileReader does, one after another; this outlives it. INVALID_ARGUMENT: they are not as long as the file.
  absl::StatusOr<FileReader> OpenFile(absl::string_view name, std::vector<absl::Span<std::byte>> pieces) const;

 private:
  CheckpointReader(Fs* fs, std::string folder, v1::CheckpointManifest manifest)
      : fs_(fs), folder_(std::move(folder)), manifest_(std::move(manifest)) {}

  Fs* fs_;
  std::string folder_;
  v1::CheckpointManifest manifest_;
};

}  // namespace ballast
