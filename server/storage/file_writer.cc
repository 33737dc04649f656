#include "server/storage/file_writer.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "proto/checkpoint/file_digest.h"

#include "server/base/clock.h"
#include "server/base/failpoint.h"
#include "server/base/status_macros.h"

namespace ballast {
namespace {

// Gathers pieces in the buffer, and writes it when it is full.
class BlockWriter {
 public:
  BlockWriter(OutputFile* file, absl::Span<std::byte> buffer, absl::FunctionRef<absl::Status(uint64_t)> leave)
      : file_(file), buffer_(buffer), leave_(leave) {}

  absl::Status Add(absl::Span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const size_t taken = std::min(bytes.size(), buffer_.size() - filled_);
      std::memcpy(buffer_.data() + filled_, bytes.data(), taken);
      filled_ += taken;
      bytes.remove_prefix(taken);
      if (filled_ == buffer_.size()) RETURN_IF_ERROR(Flush());
    }
    return absl::OkStatus();
  }

  // The last block is written whole, and what is too much of it cut off, so that it, too, may pass the page cache.
  absl::Status Finish() {
    const uint64_t bytes = written_ + filled_, beyond = filled_ % OutputFile::kDirect;
    if (beyond == 0) return filled_ == 0 ? absl::OkStatus() : Flush();
    const size_t padding = static_cast<size_t>(OutputFile::kDirect - beyond);
    digest_.Add(buffer_.first(filled_));
    digested_ = true;
    std::memset(buffer_.data() + filled_, 0, padding);
    filled_ += padding;
    RETURN_IF_ERROR(Flush());
    return file_->SetSize(bytes);
  }

  FileDigest& digest() { return digest_; }

 private:
  absl::Status Flush() {
    const auto block = buffer_.first(filled_);
    if (!digested_) digest_.Add(block);  // while it is in the processor's cache
    RETURN_IF_ERROR(leave_(block.size()));
    RETURN_IF_ERROR(file_->Write(written_, block));
    written_ += block.size();
    filled_ = 0;
    return absl::OkStatus();
  }

  OutputFile* const file_;
  const absl::Span<std::byte> buffer_;
  const absl::FunctionRef<absl::Status(uint64_t)> leave_;
  FileDigest digest_;
  bool digested_ = false;  // what is in the buffer
  size_t filled_ = 0;      // of the buffer
  uint64_t written_ = 0;   // to the file
};

}  // namespace

DiskBuffer::DiskBuffer() : data_(static_cast<std::byte*>(std::aligned_alloc(OutputFile::kDirect, kBytes))) {
  if (data_ == nullptr) throw std::bad_alloc();
  std::memset(data_.get(), 0, kBytes);  // it is really there
}

void DiskBuffer::Free::operator()(std::byte* data) const { std::free(data); }

bool RateLimit::Take(uint64_t bytes) {
  absl::MutexLock lock(&mu_);
  if (bytes_per_s_ == 0) return !stopped_;
  const double now_s = MonotonicSeconds();
  const double mine_s = std::max(now_s, free_at_s_);
  free_at_s_ = mine_s + static_cast<double>(bytes) / static_cast<double>(bytes_per_s_);
  return !mu_.AwaitWithTimeout(absl::Condition(&stopped_), absl::Seconds(mine_s - now_s));
}

void RateLimit::Stop() {
  absl::MutexLock lock(&mu_);
  stopped_ = true;
}

absl::StatusOr<v1::CheckpointFile> WriteFile(Fs* fs, const std::string& folder, const FileContent& content,
                                             const DiskBuffer& buffer,
                                             absl::FunctionRef<absl::Status(uint64_t bytes)> leave) {
  ASSIGN_OR_RETURN(const std::unique_ptr<OutputFile> file, fs->Create(absl::StrCat(folder, "/", content.name)));
  BlockWriter writer(file.get(), buffer.bytes(), leave);
  for (const auto& piece : content.pieces) RETURN_IF_ERROR(writer.Add(piece));
  RETURN_IF_ERROR(writer.Finish());
  Failpoint("file.written");
  RETURN_IF_ERROR(file->Sync());
  return writer.digest().Finish(content.name);
}

}  // namespace ballast
