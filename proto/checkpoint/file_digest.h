// The checksums that a checkpoint keeps of each of its files, made as the file's bytes go by: a CRC-32C for each MiB and
// a SHA-256 of all (proto/CHECKPOINTS.md).
//
//   FileDigest digest;
//   digest.Add(bytes); ...
//   *manifest.add_files() = digest.Finish("model-00001-of-00001.safetensors");
//
// Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "ballast/v1/checkpoint.pb.h"

namespace ballast {

// What has a CRC-32C of its own in a file.
inline constexpr uint64_t kChecksumBlock = uint64_t{1} << 20;

class FileDigest {
 public:
  FileDigest();
  ~FileDigest();
  FileDigest(const FileDigest&) = delete;
  FileDigest& operator=(const FileDigest&) = delete;

  void Add(absl::Span<const std::byte> bytes);
  // Once, when all was added.
  v1::CheckpointFile Finish(std::string name);

 private:
  struct Sha256;
  std::unique_ptr<Sha256> sha256_;
  v1::CheckpointFile file_;
  uint32_t crc_ = 0;       // of the block under way
  uint64_t in_block_ = 0;  // bytes of it
};

// Of a whole file in memory.
v1::CheckpointFile DigestOf(std::string name, absl::string_view bytes);

}  // namespace ballast
