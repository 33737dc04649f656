#include "server/storage/file_writer.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <future>
#include <new>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/checkpoint/file_digest.h"

#include "server/base/clock.h"
#include "server/base/failpoint.h"
#include "server/base/status_macros.h"

namespace ballast {
namespace {

// Gathers pieces in one half of the buffer while the other one is written: a checksum takes as long as a fast disk.
class BlockWriter {
 public:
  BlockWriter(OutputFile* file, absl::Span<std::byte> buffer, absl::FunctionRef<absl::Status(uint64_t)> leave)
      : file_(file),
        filling_(buffer.first(buffer.size() / 2)),
        other_(buffer.subspan(buffer.size() / 2)),
        leave_(leave) {}

  absl::Status Add(absl::Span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const size_t taken = std::min(bytes.size(), filling_.size() - filled_);
      std::memcpy(filling_.data() + filled_, bytes.data(), taken);
      filled_ += taken;
      bytes.remove_prefix(taken);
      if (filled_ == filling_.size()) RETURN_IF_ERROR(Flush());
    }
    return absl::OkStatus();
  }

  // The last block is written whole, and what is too much of it cut off, so that it, too, may pass the page cache.
  absl::Status Finish() {
    const uint64_t bytes = begun_ + filled_, beyond = filled_ % OutputFile::kDirect;
    if (beyond != 0) {
      const size_t padding = static_cast<size_t>(OutputFile::kDirect - beyond);
      digest_.Add(filling_.first(filled_));
      digested_ = true;
      std::memset(filling_.data() + filled_, 0, padding);
      filled_ += padding;
    }
    if (filled_ > 0) RETURN_IF_ERROR(Flush());
    RETURN_IF_ERROR(Await());
    return beyond == 0 ? absl::OkStatus() : file_->SetSize(bytes);
  }

  FileDigest& digest() { return digest_; }

 private:
  absl::Status Flush() {
    const auto block = filling_.first(filled_);
    if (!digested_) digest_.Add(block);  // while it is in the processor's cache
    RETURN_IF_ERROR(Await());
    const auto write = [this, block, at = begun_]() -> absl::Status {
      RETURN_IF_ERROR(leave_(block.size()));
      return file_->Write(at, block);
    };
    try {
      writing_ = std::async(std::launch::async, write);
    } catch (const std::system_error&) {  // there is no thread to be had
      RETURN_IF_ERROR(write());
    }
    begun_ += block.size();
    std::swap(filling_, other_);
    filled_ = 0;
    return absl::OkStatus();
  }
  // For the block that is under way.
  absl::Status Await() { return writing_.valid() ? writing_.get() : absl::OkStatus(); }

  OutputFile* const file_;
  absl::Span<std::byte> filling_, other_;
  const absl::FunctionRef<absl::Status(uint64_t)> leave_;
  FileDigest digest_;
  bool digested_ = false;              // what is in the half that is filling
  size_t filled_ = 0;                  // of it
  uint64_t begun_ = 0;                 // of the file
  std::future<absl::Status> writing_;  // of the other half; its destructor waits
};

}  // namespace

DiskBuffer::DiskBuffer() {
  void* const data = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) throw std::bad_alloc();
  data_.reset(static_cast<std::byte*>(data));
  std::memset(data_.get(), 0, kBytes);  // it is really there
}

void DiskBuffer::Free::operator()(std::byte* data) const { munmap(data, kBytes); }

bool RateLimit::Take(uint64_t bytes) {
  if (bytes_per_s_ == 0) return !stopped_.RaisedWithin(0);
  const double now_s = MonotonicSeconds();
  double mine_s = now_s;
  {
    absl::MutexLock lock(&mu_);
    mine_s = std::max(now_s, free_at_s_);
    free_at_s_ = mine_s + static_cast<double>(bytes) / static_cast<double>(bytes_per_s_);
  }
  return !stopped_.RaisedWithin(mine_s - now_s);
}

void RateLimit::Stop() { stopped_.Raise(); }

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
