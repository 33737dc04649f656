#include "server/storage/file_reader.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/checkpoint/file_digest.h"
#include "proto/checksum.h"

#include "server/base/status_macros.h"
#include "server/storage/damage.h"

namespace ballast {

FileReader::FileReader(std::unique_ptr<InputFile> file, std::string path, const v1::CheckpointFile* entry,
                       std::vector<absl::Span<std::byte>> pieces)
    : file_(std::move(file)), path_(std::move(path)), entry_(entry), pieces_(std::move(pieces)) {
  uint64_t end = 0;
  for (const auto& piece : pieces_) ends_.push_back(end += piece.size());
}

size_t FileReader::blocks() const {
  return static_cast<size_t>((entry_->bytes() + DiskBuffer::kBytes - 1) / DiskBuffer::kBytes);
}

absl::Status FileReader::Read(size_t block, const DiskBuffer& buffer) const {
  const uint64_t begin = block * DiskBuffer::kBytes;
  const auto bytes = buffer.bytes().first(static_cast<size_t>(std::min(entry_->bytes() - begin, DiskBuffer::kBytes)));
  RETURN_IF_ERROR(file_->Read(begin, bytes));
  RETURN_IF_ERROR(Check(begin, bytes));
  Scatter(begin, bytes);
  return absl::OkStatus();
}

absl::Status FileReader::Check(uint64_t begin, absl::Span<const std::byte> block) const {
  for (uint64_t at = 0; at < block.size(); at += kChecksumBlock) {
    const uint64_t index = (begin + at) / kChecksumBlock;
    if (Crc32c(block.subspan(at, kChecksumBlock)) == entry_->crc32c(static_cast<int>(index))) continue;
    return Damaged(path_, "checksum",
                   absl::StrCat("MiB ", index, " of it has not the checksum that the manifest says"));
  }
  return absl::OkStatus();
}

void FileReader::Scatter(uint64_t begin, absl::Span<const std::byte> bytes) const {
  auto piece = static_cast<size_t>(std::upper_bound(ends_.begin(), ends_.end(), begin) - ends_.begin());
  for (; !bytes.empty(); ++piece) {
    const auto at = static_cast<size_t>(begin - (ends_[piece] - pieces_[piece].size()));
    const size_t taken = std::min(pieces_[piece].size() - at, bytes.size());
    if (taken > 0 && pieces_[piece].data() != nullptr) std::memcpy(pieces_[piece].data() + at, bytes.data(), taken);
    bytes.remove_prefix(taken);
    begin += taken;
  }
}

}  // namespace ballast
