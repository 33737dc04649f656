#include "server/storage/journal_writer.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"

#include "server/base/clock.h"
#include "server/base/failpoint.h"
#include "server/base/log.h"
#include "server/base/start_thread.h"
#include "server/base/status_macros.h"
#include "server/storage/journal_files.h"

namespace ballast {
namespace {

// The files before `below`, the oldest first: what a crash leaves of them has no beginning, and is not read.
absl::Status RemoveFilesBelow(Fs* fs, const std::string& folder, const std::vector<JournalFile>& files,
                              uint64_t below) {
  absl::Status first;
  for (const JournalFile& file : files) {
    if (file.number < below) first.Update(fs->RemoveFile(file.path));
  }
  first.Update(fs->SyncFolder(folder));
  return first;
}

// Calls `remove` with all files and the one that begins with this identity, if there is one; what fails is logged.
void RemoveAt(Fs* fs, const std::string& folder, uint64_t base,
              absl::FunctionRef<absl::Status(const std::vector<JournalFile>&, const JournalFile&)> remove) {
  const auto files = ListJournal(fs, folder);
  absl::Status status = files.status();
  for (const JournalFile& file : files.value_or(std::vector<JournalFile>())) {
    if (file.head.base == base) status = remove(*files, file);
  }
  if (status.ok()) return;
  Log(LogLevel::kWarn, "journal", "files of the journal that are no longer needed could not be removed",
      {{"path", folder}, {"err", std::string(status.message())}});
}

}  // namespace

JournalWriter::JournalWriter(Options options) : options_(std::move(options)) {
  for (size_t block = 0; block < kBlocks; ++block) free_.push_back(block);
  thread_ = StartThread([this] { Loop(); });
}

JournalWriter::~JournalWriter() {
  HandOver();
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  thread_.join();
}

// --- the thread that appends ----------------------------------------------------------------------------------------

size_t JournalWriter::Append(absl::Span<const std::byte> bytes) {
  size_t taken = 0;
  while (taken < bytes.size()) {
    if (!filling_) {
      absl::MutexLock lock(&mu_);
      wants_room_ = free_.empty();
      if (free_.empty()) return taken;
      filling_ = free_.back();
      free_.pop_back();
      filled_ = 0;
    }
    const size_t part = std::min<size_t>(bytes.size() - taken, FrameHeader::kMostPayload - filled_);
    std::memcpy(blocks_[*filling_].bytes().data() + FrameHeader::kBytes + filled_, bytes.data() + taken, part);
    taken += part;
    filled_ += static_cast<uint32_t>(part);
    if (filled_ == FrameHeader::kMostPayload) HandOver();
  }
  return taken;
}

void JournalWriter::HandOver() {
  if (!filling_) return;
  const size_t block = *std::exchange(filling_, std::nullopt);
  if (filled_ == 0) return Free(block);
  Add({.what = Job::What::kWrite, .block = block, .bytes = filled_});
}

void JournalWriter::BeginSegment(const SegmentHead& head) {
  HandOver();
  Add({.what = Job::What::kBegin, .head = head});
}

void JournalWriter::Commit(uint64_t serial) {
  HandOver();
  Add({.what = Job::What::kSync, .serial = serial});
}

void JournalWriter::RemoveBefore(uint64_t base) {
  Add({.task = [this, base] {
    RemoveAt(options_.fs, options_.folder, base,
             [this](const std::vector<JournalFile>& files, const JournalFile& file) {
               Failpoint("journal.covered");
               return RemoveFilesBelow(options_.fs, options_.folder, files, file.number);
             });
  }});
}

void JournalWriter::Remove(uint64_t base) {
  Add({.task = [this, base] {
    RemoveAt(options_.fs, options_.folder, base, [this](const std::vector<JournalFile>&, const JournalFile& file) {
      if (file.path == path_) {
        file_.reset();
        failed_ = true;
      }
      return options_.fs->RemoveFile(file.path);
    });
  }});
}

void JournalWriter::RemoveAll(absl::AnyInvocable<void(absl::Status)> done) {
  Add({.task = [this, done = std::move(done)]() mutable {
    file_.reset();
    failed_ = true;
    auto files = ListJournal(options_.fs, options_.folder);
    if (!files.ok()) return done(files.status());
    done(files->empty() ? absl::OkStatus()
                        : RemoveFilesBelow(options_.fs, options_.folder, *files, std::numeric_limits<uint64_t>::max()));
  }});
}

void JournalWriter::Add(Job job) {
  absl::MutexLock lock(&mu_);
  jobs_.push_back(std::move(job));
}

// --- the writer's thread --------------------------------------------------------------------------------------------

void JournalWriter::Loop() {
  const auto has_work = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return stopping_ || !jobs_.empty(); };
  while (true) {
    Job job;
    {
      absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(&has_work));
      if (jobs_.empty()) return;
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    Do(&job);
  }
}

void JournalWriter::Do(Job* job) {
  absl::Status status;
  switch (job->what) {
    case Job::What::kTask:
      return job->task();
    case Job::What::kBegin:
      failed_ = failed_ && job->head.continues != 0;
      if (!failed_) status = Begin(job->head);
      break;
    case Job::What::kWrite:
      if (!failed_) status = WriteBlock(job->block, job->bytes);
      Free(job->block);
      break;
    case Job::What::kSync:
      if (!failed_) status = SyncFile();
      if (!failed_ && status.ok()) options_.on_synced(job->serial);
      break;
  }
  if (status.ok()) return;
  failed_ = true;
  file_.reset();
  options_.on_failed(status);
}

absl::Status JournalWriter::MakeFolder() {
  const absl::Status made = options_.fs->MakeFolder(options_.folder);
  if (!made.ok() && !absl::IsAlreadyExists(made)) return made;
  // Also if it was there: who made it may have died before this.
  absl::Status synced = options_.fs->SyncFolder(options_.folder.substr(0, options_.folder.rfind('/')));
  // A later sync would not make up for this one: the folder is to be made again.
  if (!synced.ok() && made.ok()) options_.fs->RemoveFolder(options_.folder).IgnoreError();
  return synced;
}

absl::Status JournalWriter::Begin(const SegmentHead& head) {
  // The file before must be there, whole, wherever this one is.
  if (head.continues != 0 && file_ != nullptr && synced_ < sequence_) RETURN_IF_ERROR(SyncFile());
  file_.reset();
  RETURN_IF_ERROR(MakeFolder());
  ASSIGN_OR_RETURN(const uint64_t newest, NewestSegment(options_.fs, options_.folder));
  number_ = std::max(number_, newest) + 1;
  path_ = absl::StrCat(options_.folder, "/", SegmentName(number_));
  ASSIGN_OR_RETURN(file_, options_.fs->Create(path_));
  Failpoint("journal.begun");
  absl::Status status = WriteHead(head);
  if (status.ok()) return status;
  // Nobody reads a file without a head, and each try would leave one.
  file_.reset();
  options_.fs->RemoveFile(path_).IgnoreError();
  return status;
}

absl::Status JournalWriter::WriteHead(const SegmentHead& head) {
  at_ = sequence_ = synced_ = 0;
  named_ = false;
  const std::string text = HeadText(head);
  alignas(OutputFile::kDirect) std::array<std::byte, OutputFile::kDirect> block;
  std::memcpy(block.data() + FrameHeader::kBytes, text.data(), text.size());
  const uint64_t bytes = SealFrame({.segment = number_}, absl::MakeSpan(block), static_cast<uint32_t>(text.size()));
  RETURN_IF_ERROR(file_->Write(0, absl::MakeSpan(block).subspan(0, bytes)));
  at_ = bytes;
  sequence_ = 1;
  return SyncFile();
}

absl::Status JournalWriter::WriteBlock(size_t block, uint32_t bytes) {
  const absl::Span<std::byte> all = blocks_[block].bytes();
  const uint64_t frame = SealFrame({.segment = number_, .sequence = sequence_, .synced = synced_}, all, bytes);
  RETURN_IF_ERROR(file_->Write(at_, all.subspan(0, frame)));
  Failpoint("journal.written");
  at_ += frame;
  ++sequence_;
  return absl::OkStatus();
}

absl::Status JournalWriter::SyncFile() {
  const double began_s = MonotonicSeconds();
  RETURN_IF_ERROR(file_->Sync());
  options_.on_sync_took(MonotonicSeconds() - began_s);
  if (!named_) RETURN_IF_ERROR(options_.fs->SyncFolder(options_.folder));
  named_ = true;
  synced_ = sequence_;
  Failpoint("journal.synced");
  return absl::OkStatus();
}

void JournalWriter::Free(size_t block) {
  bool wanted = false;
  {
    absl::MutexLock lock(&mu_);
    free_.push_back(block);
    wanted = std::exchange(wants_room_, false);
  }
  if (wanted) options_.on_room();
}

}  // namespace ballast
