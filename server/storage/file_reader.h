// Reads one file of a checkpoint into pieces of memory: past the page cache where that is possible, in blocks of 4 MiB,
// each MiB compared with its checksum before any of it is given out.
//
//   ASSIGN_OR_RETURN(const FileReader reader, checkpoint.OpenFile(name, pieces));
//   for (size_t block = 0; block < reader.blocks(); ++block) RETURN_IF_ERROR(reader.Read(block, buffer));
//
// Thread-safe, with a buffer for each thread: blocks may be read side by side.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "ballast/v1/checkpoint.pb.h"
#include "server/storage/file_writer.h"
#include "server/storage/fs.h"

namespace ballast {

class FileReader {
 public:
  // The file, which is as long as its entry and as the pieces together. All of them outlive this. What is to go to a piece
  // without memory, whose data() is nullptr, is compared alone.
  FileReader(std::unique_ptr<InputFile> file, std::string path, const v1::CheckpointFile* entry,
             std::vector<absl::Span<std::byte>> pieces);

  size_t blocks() const;
  // DATA_LOSS names the file, and the MiB of it, that is damaged.
  absl::Status Read(size_t block, const DiskBuffer& buffer) const;

 private:
  absl::Status Check(uint64_t begin, absl::Span<const std::byte> block) const;
  void Scatter(uint64_t begin, absl::Span<const std::byte> bytes) const;

  std::unique_ptr<InputFile> file_;
  std::string path_;
  const v1::CheckpointFile* entry_;
  std::vector<absl::Span<std::byte>> pieces_;
  std::vector<uint64_t> ends_;  // of the pieces, in the file
};

}  // namespace ballast
