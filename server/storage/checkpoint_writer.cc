#include "server/storage/checkpoint_writer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "proto/checkpoint/manifest.h"

#include "server/base/clock.h"
#include "server/base/failpoint.h"
#include "server/base/log.h"
#include "server/base/status_macros.h"
#include "server/base/version.h"

namespace ballast {
namespace {

absl::Status StoppedError() { return absl::CancelledError("the daemon writes no checkpoints any more"); }

}  // namespace

CheckpointWriter::CheckpointWriter(Options options) : options_(options), thread_([this] { Loop(); }) {}

CheckpointWriter::~CheckpointWriter() { Stop(); }

void CheckpointWriter::Write(CheckpointOrder order, Done done) { Add({std::move(order), std::move(done), nullptr}); }

void CheckpointWriter::Run(absl::AnyInvocable<void()> task) { Add({{}, nullptr, std::move(task)}); }

void CheckpointWriter::Add(Job job) {
  {
    absl::MutexLock lock(&mu_);
    if (!stopped_) {
      jobs_.push_back(std::move(job));
      return;
    }
  }
  job.task ? job.task() : job.done(StoppedError());
}

void CheckpointWriter::Stop() {
  {
    absl::MutexLock lock(&mu_);
    stopped_ = true;
  }
  if (thread_.joinable()) thread_.join();
}

void CheckpointWriter::Loop() {
  const auto has_work = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return stopped_ || !jobs_.empty(); };
  while (true) {
    Job job;
    bool stopped = false;
    {
      absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(&has_work));
      if (jobs_.empty()) return;
      job = std::move(jobs_.front());
      jobs_.pop_front();
      stopped = stopped_;
    }
    if (job.task) {
      job.task();
    } else {
      job.done(stopped ? absl::StatusOr<CheckpointWritten>(StoppedError()) : WriteNow(&job.order));
    }
  }
}

absl::StatusOr<CheckpointWritten> CheckpointWriter::WriteNow(CheckpointOrder* order) {
  RunFolder& folder = *order->folder;
  ASSIGN_OR_RETURN(const uint64_t number, folder.NextNumber());
  CheckpointWritten written{.place = {number, order->step}};
  written.folder = absl::StrCat(folder.path(), "/", NameOf(written.place));
  ASSIGN_OR_RETURN(const std::string path, folder.Begin(written.place));
  Failpoint("checkpoint.begun");
  absl::Status status = WriteContent(order, path, &written);
  const double synced_s = MonotonicSeconds();
  if (status.ok()) status = folder.Publish(written.place);
  if (!status.ok()) {
    // Of what was renamed and not synced nobody knows whether it counts after a power cut; it is whole in any case.
    if (absl::Status cleaned = folder.CleanUp(); !cleaned.ok()) {
      Log(LogLevel::kWarn, "checkpoint", "what was begun of a checkpoint is left", {{"err", cleaned.ToString()}});
    }
    return status;
  }
  Failpoint("checkpoint.published");
  written.publish_seconds = MonotonicSeconds() - synced_s;
  written.retained = folder.Retain(order->retain, order->replaces, order->spares);
  Failpoint("checkpoint.retained");
  return written;
}

absl::Status CheckpointWriter::WriteContent(CheckpointOrder* order, const std::string& path,
                                            CheckpointWritten* written) {
  const double began_s = MonotonicSeconds();
  const CheckpointContent content = order->content();
  ASSIGN_OR_RETURN(std::vector<v1::CheckpointFile> entries, WriteFiles(*order, path, content.files));
  Failpoint("checkpoint.files_synced");
  const BuildInfo build = ThisBuild();
  v1::CheckpointManifest manifest;
  manifest.set_format(kCheckpointFormat);
  manifest.set_run_id(order->run_id);
  manifest.set_spec_sha256(order->spec_sha256);
  manifest.set_step(order->step);
  manifest.set_generation(order->generation);
  manifest.set_written_at(absl::FormatTime(absl::RFC3339_sec, absl::Now(), absl::UTCTimeZone()));
  manifest.set_version(build.version);
  manifest.set_revision(build.revision);
  for (v1::CheckpointFile& entry : entries) {
    written->bytes += entry.bytes();
    *manifest.add_files() = std::move(entry);
  }
  const std::string text = ToJson(manifest);
  RETURN_IF_ERROR(WriteText(*order, path, kManifestName, text));
  Failpoint("checkpoint.manifest_synced");
  RETURN_IF_ERROR(WriteText(*order, path, kSumsName, SumsText(text, manifest)));
  Failpoint("checkpoint.sums_synced");
  written->write_seconds = MonotonicSeconds() - began_s;
  return absl::OkStatus();
}

absl::StatusOr<std::vector<v1::CheckpointFile>> CheckpointWriter::WriteFiles(const CheckpointOrder& order,
                                                                             const std::string& folder,
                                                                             const std::vector<FileContent>& files) {
  std::vector<v1::CheckpointFile> entries(files.size());
  const auto write = [&](size_t f, const DiskBuffer& buffer) -> absl::Status {
    ASSIGN_OR_RETURN(entries[f], WriteFile(options_.fs, folder, files[f], buffer, Leave(order)));
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(options_.threads->ForEach(files.size(), write));
  std::sort(entries.begin(), entries.end(),
            [](const v1::CheckpointFile& a, const v1::CheckpointFile& b) { return a.name() < b.name(); });
  return entries;
}

absl::Status CheckpointWriter::WriteText(const CheckpointOrder& order, const std::string& folder,
                                         absl::string_view name, const std::string& text) {
  const FileContent content{.name = std::string(name),
                            .pieces = {{reinterpret_cast<const std::byte*>(text.data()), text.size()}}};
  return WriteFiles(order, folder, {content}).status();
}

std::function<absl::Status(uint64_t)> CheckpointWriter::Leave(const CheckpointOrder& order) {
  return [this, cancelled = order.cancelled](uint64_t bytes) -> absl::Status {
    if (*cancelled) return absl::CancelledError("the checkpoint is not wanted any more");
    {
      absl::MutexLock lock(&mu_);
      if (stopped_) return StoppedError();
    }
    return options_.rate->Take(bytes) ? absl::OkStatus() : StoppedError();
  };
}

}  // namespace ballast
