// A version of a run's weights as a file: safetensors, so that any tool can read it (proto/CHECKPOINTS.md, "Versions with
// names"). Every tensor has its codes as they are served, in the serving format's own dtype; one of an int8 format also the
// scales of its rows, in a second tensor. The header follows from the spec and the metadata to the byte, and each MiB of
// data has a checksum there, so that nothing damaged is ever given out.
//
//   const std::string header = VersionHeader(spec, info);
//   ASSIGN_OR_RETURN(auto file, VersionFile::Open(fs, path, &spec));
//   ASSIGN_OR_RETURN(VersionPiecePtr piece, file->Read(tensor, chunk));
//
// Functions: thread-safe. A VersionFile is used by one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "server/follow/version.h"
#include "server/spec/run_spec.h"
#include "server/storage/fs.h"

namespace ballast {

// What the header says beside the tensors.
struct VersionFileInfo {
  std::string run_id, tag;
  uint64_t mark = 0;  // VersionTag's
  VersionId id;
  double closed_unix_s = 0, tagged_unix_s = 0;
  std::vector<uint64_t> digests;  // by tensor
  std::vector<uint32_t> sums;     // CRC-32C of each MiB of the data
};

// Of all data, in bytes.
uint64_t VersionDataBytes(const RunSpec& spec);
// What the file has after its header: memory of the version's.
std::vector<absl::Span<const std::byte>> VersionData(const RunSpec& spec, const std::vector<uint64_t>& chunk_starts,
                                                     const WeightVersion& version);
// CRC-32C of each MiB of these, one after another.
std::vector<uint32_t> DataSums(const std::vector<absl::Span<const std::byte>>& data);
// With its length before it, padded.
std::string VersionHeader(const RunSpec& spec, const VersionFileInfo& info);

class VersionFile {
 public:
  // Reads the header. While it is there it keeps kStoredReadBytes (plan.h) in memory, beside that. DATA_LOSS: it is damaged, or the file has another length; FAILED_PRECONDITION: it is of another spec
  // than this one. `spec` outlives it.
  static absl::StatusOr<std::unique_ptr<VersionFile>> Open(Fs* fs, const std::string& path, const RunSpec* spec);

  const VersionFileInfo& info() const { return info_; }
  uint64_t bytes() const { return data_bytes_; }  // of codes and scales
  // A chunk of a tensor. DATA_LOSS names the file and the MiB that is damaged.
  absl::StatusOr<VersionPiecePtr> Read(uint32_t tensor, uint64_t chunk);

 private:
  struct Place {
    uint64_t codes = 0, scales = 0;  // where they begin in the data
  };
  // A MiB that was read last.
  struct Block {
    uint64_t number = ~uint64_t{0};
    std::vector<std::byte> bytes;
  };

  VersionFile(std::unique_ptr<InputFile> file, std::string path, const RunSpec* spec)
      : file_(std::move(file)), path_(std::move(path)), spec_(spec) {}
  absl::Status ReadHeader();
  absl::Status ReadBlock(uint64_t number, Block* block);
  absl::Status ReadData(uint64_t begin, absl::Span<std::byte> to, Block* block);

  const std::unique_ptr<InputFile> file_;
  const std::string path_;
  const RunSpec* const spec_;
  VersionFileInfo info_;
  uint64_t data_begin_ = 0, data_bytes_ = 0;
  std::vector<Place> places_;  // by tensor
  Block codes_, scales_;
};

}  // namespace ballast
