#include "server/storage/journal_frames.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/checksum.h"

#include "server/base/status_macros.h"

namespace ballast {
namespace {

constexpr uint32_t kFrameMagic = 0x464a4c42;  // "BLJF"
constexpr size_t kCheckedFrom = 8;            // of a header: what its checksum covers

// As it lies in the file, little-endian.
struct RawHeader {
  uint32_t magic, crc_of_header;
  uint64_t segment, sequence, synced;
  uint32_t bytes, crc;
};
static_assert(sizeof(RawHeader) == FrameHeader::kBytes);

uint64_t FrameBytes(uint64_t payload) {
  const uint64_t bytes = FrameHeader::kBytes + payload;
  return (bytes + OutputFile::kDirect - 1) / OutputFile::kDirect * OutputFile::kDirect;
}

uint32_t CrcOf(const RawHeader& raw) {
  return Crc32c({reinterpret_cast<const std::byte*>(&raw) + kCheckedFrom, sizeof(raw) - kCheckedFrom});
}

}  // namespace

uint64_t SealFrame(FrameHeader header, absl::Span<std::byte> block, uint32_t payload_bytes) {
  const uint64_t bytes = FrameBytes(payload_bytes);
  RawHeader raw{.magic = kFrameMagic,
                .crc_of_header = 0,
                .segment = header.segment,
                .sequence = header.sequence,
                .synced = header.synced,
                .bytes = payload_bytes,
                .crc = Crc32c(block.subspan(FrameHeader::kBytes, payload_bytes))};
  raw.crc_of_header = CrcOf(raw);
  std::memcpy(block.data(), &raw, sizeof(raw));
  const uint64_t used = FrameHeader::kBytes + payload_bytes;
  std::memset(block.data() + used, 0, bytes - used);
  return bytes;
}

absl::StatusOr<FrameReader> FrameReader::Open(Fs* fs, const std::string& path, uint64_t segment) {
  ASSIGN_OR_RETURN(std::unique_ptr<InputFile> file, fs->Open(path));
  return FrameReader(std::move(file), path, segment);
}

absl::StatusOr<std::optional<FrameHeader>> FrameReader::HeaderAt(uint64_t offset) {
  if (file_->bytes() < offset + FrameHeader::kBytes) return std::nullopt;
  RawHeader raw;
  RETURN_IF_ERROR(file_->Read(offset, {reinterpret_cast<std::byte*>(&raw), sizeof(raw)}));
  if (raw.magic != kFrameMagic || raw.crc_of_header != CrcOf(raw) || raw.segment != segment_) return std::nullopt;
  return FrameHeader{raw.segment, raw.sequence, raw.synced, raw.bytes, raw.crc};
}

absl::Status FrameReader::TornOrDamaged(const char* what) {
  for (uint64_t later = at_ + OutputFile::kDirect; later < file_->bytes(); later += OutputFile::kDirect) {
    ASSIGN_OR_RETURN(const std::optional<FrameHeader> header, HeaderAt(later));
    if (!header || header->sequence <= sequence_ || header->synced <= sequence_) continue;
    return absl::DataLossError(absl::StrCat(path_, " is damaged: frame ", sequence_, ", at byte ", at_, ", ", what,
                                            ", and had been on the disk before later ones were written"));
  }
  return absl::OutOfRangeError(absl::StrCat(path_, " ends at byte ", at_, ": ", what));
}

absl::Status FrameReader::Next() {
  ASSIGN_OR_RETURN(const std::optional<FrameHeader> header, HeaderAt(at_));
  if (!header || header->sequence != sequence_) return TornOrDamaged("there is no frame");
  if (header->bytes > FrameHeader::kMostPayload || file_->bytes() < at_ + FrameHeader::kBytes + header->bytes) {
    return TornOrDamaged("the frame is not whole");
  }
  const absl::Span<std::byte> payload = buffer_.bytes().subspan(0, header->bytes);
  RETURN_IF_ERROR(file_->Read(at_ + FrameHeader::kBytes, payload));
  if (Crc32c(payload) != header->crc) return TornOrDamaged("the frame has another checksum");
  begin_ = 0;
  left_ = header->bytes;
  at_ += FrameBytes(header->bytes);
  ++sequence_;
  return absl::OkStatus();
}

absl::Status FrameReader::Read(absl::Span<std::byte> to) {
  while (!to.empty()) {
    if (left_ == 0) {
      RETURN_IF_ERROR(Next());
      continue;
    }
    const size_t taken = std::min<size_t>(to.size(), left_);
    std::memcpy(to.data(), buffer_.bytes().data() + begin_, taken);
    to.remove_prefix(taken);
    begin_ += taken;
    left_ -= taken;
  }
  return absl::OkStatus();
}

absl::Status FrameReader::Skip(uint64_t bytes) {
  while (bytes > 0) {
    if (left_ == 0) {
      RETURN_IF_ERROR(Next());
      continue;
    }
    const uint64_t taken = std::min(bytes, left_);
    bytes -= taken;
    begin_ += taken;
    left_ -= taken;
  }
  return absl::OkStatus();
}

}  // namespace ballast
