// The bytes of a journal's file: frames, each a piece of one stream, with checksums, at a multiple of 4096 in the file
// (proto/CHECKPOINTS.md, "The journal"). A crash tears the last frames off; whatever else is wrong is damage, and told.
//
//   const uint64_t bytes = SealFrame({.segment = 3, .sequence = 0}, block, 120);   // then these are written
//   ASSIGN_OR_RETURN(FrameReader reader, FrameReader::Open(fs, path, 3));
//   absl::Status status = reader.Read(to);                                          // OUT_OF_RANGE: the stream ends before
//
// A reader is used by one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "server/storage/file_writer.h"
#include "server/storage/fs.h"

namespace ballast {

// What a frame says of itself.
struct FrameHeader {
  static constexpr uint64_t kBytes = 40;
  static constexpr uint64_t kMostPayload = DiskBuffer::kBytes - kBytes;

  uint64_t segment = 0;   // the number of its file
  uint64_t sequence = 0;  // in the file, from 0
  uint64_t synced = 0;    // frames before this one were on the disk when it was made: they cannot be torn
  uint32_t bytes = 0;     // of its payload
  uint32_t crc = 0;       // CRC-32C of the payload
};

// Makes the frame of the payload, which lies in the block behind room for the header, and zeros behind it. Returns its
// bytes, a multiple of OutputFile::kDirect.
uint64_t SealFrame(FrameHeader header, absl::Span<std::byte> block, uint32_t payload_bytes);

class FrameReader {
 public:
  static absl::StatusOr<FrameReader> Open(Fs* fs, const std::string& path, uint64_t segment);

  // All of `to`. OUT_OF_RANGE: the stream ends before, by a crash or as it was written. DATA_LOSS: a frame in the middle
  // is damaged; names it.
  absl::Status Read(absl::Span<std::byte> to);
  absl::Status Skip(uint64_t bytes);
  // What the stream may still have, at most.
  uint64_t most_left() const { return left_ + (file_->bytes() > at_ ? file_->bytes() - at_ : 0); }
  const std::string& path() const { return path_; }

 private:
  FrameReader(std::unique_ptr<InputFile> file, std::string path, uint64_t segment)
      : file_(std::move(file)), path_(std::move(path)), segment_(segment) {}
  // The next frame's payload is in the buffer.
  absl::Status Next();
  // Of the frame at this offset; none: there is no whole header.
  absl::StatusOr<std::optional<FrameHeader>> HeaderAt(uint64_t offset);
  // The frame at at_ is not whole: OUT_OF_RANGE, or DATA_LOSS where a later one says that it was on the disk.
  absl::Status TornOrDamaged(const char* what);

  std::unique_ptr<InputFile> file_;
  std::string path_;
  uint64_t segment_ = 0;
  DiskBuffer buffer_;
  uint64_t at_ = 0;        // of the next frame, in the file
  uint64_t sequence_ = 0;  // likewise
  uint64_t begin_ = 0;     // in the buffer, of what is to be read
  uint64_t left_ = 0;      // bytes of it
};

}  // namespace ballast
