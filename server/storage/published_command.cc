#include "server/storage/published_command.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/time/time.h"

#include "server/base/log.h"

namespace ballast {

PublishedCommand::PublishedCommand(Options options) : options_(std::move(options)) {
  if (!options_.command.empty()) thread_ = std::thread([this] { Loop(); });
}

PublishedCommand::~PublishedCommand() { Stop(0); }

void PublishedCommand::Tell(Told told) {
  absl::MutexLock lock(&mu_);
  told_ = std::move(told);
}

void PublishedCommand::OnPublished(Published published) {
  if (options_.command.empty()) return;
  const char* why = "a newer checkpoint of the run was published before its turn";
  Keep(published, /*failed=*/false);
  {
    absl::MutexLock lock(&mu_);
    // In the older one's place, so that a run that writes often does not lose its turn.
    const auto older = std::find_if(waiting_.begin(), waiting_.end(),
                                    [&](const Published& one) { return one.run_id == published.run_id; });
    if (closed_) {
      why = "the daemon ends";
    } else if (older != waiting_.end()) {
      std::swap(*older, published);
    } else if (waiting_.size() == kMostWaiting) {
      why = "too many runs' checkpoints wait";
    } else {
      return waiting_.push_back(std::move(published));
    }
  }
  LeaveOut(published, why);
}

void PublishedCommand::Keep(const Published& published, bool failed) {
  absl::MutexLock lock(&mu_);
  std::erase_if(failed_, [&](const Published& one) { return one.run_id == published.run_id; });
  if (failed) failed_.push_back(published);
}

void PublishedCommand::OfferAgain(const std::string& folder) {
  std::optional<Published> again;
  {
    absl::MutexLock lock(&mu_);
    const auto found =
        std::find_if(failed_.begin(), failed_.end(), [&](const Published& one) { return one.folder == folder; });
    if (found != failed_.end()) again = *found;
  }
  if (again) OnPublished(*std::move(again));
}

bool PublishedCommand::Uses(const std::string& folder) const {
  absl::MutexLock lock(&mu_);
  return in_use_ == folder;
}

void PublishedCommand::Withdraw(const std::string& folder) {
  Published left_out;
  {
    absl::MutexLock lock(&mu_);
    if (in_use_ == folder) withdrawn_ = true;
    std::erase_if(failed_, [&](const Published& one) { return one.folder == folder; });
    const auto found =
        std::find_if(waiting_.begin(), waiting_.end(), [&](const Published& one) { return one.folder == folder; });
    if (found == waiting_.end()) return;
    left_out = *std::move(found);
    waiting_.erase(found);
  }
  LeaveOut(left_out, "it was undone, or its run deleted");
}

void PublishedCommand::Stop(double within_s) {
  std::deque<Published> left_out;
  {
    const auto idle = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return waiting_.empty() && in_use_.empty(); };
    absl::MutexLock lock(&mu_);
    closed_ = true;
    if (thread_.joinable()) mu_.AwaitWithTimeout(absl::Condition(&idle), absl::Seconds(within_s));
    stopped_ = true;
    std::swap(left_out, waiting_);
  }
  for (const Published& one : left_out) LeaveOut(one, "the daemon ends");
  if (thread_.joinable()) thread_.join();
}

void PublishedCommand::LeaveOut(const Published& published, const char* why) const {
  Log(LogLevel::kInfo, "on_published", "a checkpoint's command is left out",
      {{"run_id", published.run_id}, {"step", published.step}, {"path", published.folder}, {"reason", why}});
  Told told;
  {
    absl::MutexLock lock(&mu_);
    told = told_;
  }
  if (told) told(published.run_id, "skipped");
}

std::vector<std::string> PublishedCommand::CommandOf(const Published& published) const {
  std::vector<std::string> command = options_.command;
  for (std::string& argument : command) {
    argument = absl::StrReplaceAll(argument, {{"{folder}", published.folder},
                                              {"{run}", published.run_id},
                                              {"{step}", absl::StrCat(published.step)},
                                              {"{number}", absl::StrCat(published.number)}});
  }
  return command;
}

void PublishedCommand::Loop() {
  const auto has_work = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return stopped_ || !waiting_.empty(); };
  while (true) {
    Published published;
    {
      absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(&has_work));
      if (stopped_) return;
      published = std::move(waiting_.front());
      waiting_.pop_front();
      in_use_ = published.folder;
      withdrawn_ = false;
    }
    RunOne(published);
    absl::MutexLock lock(&mu_);
    in_use_.clear();
  }
}

void PublishedCommand::RunOne(const Published& published) {
  const ChildEnd end =
      RunChild({.command = CommandOf(published), .timeout_s = options_.timeout_s, .grace_s = options_.grace_s}, [this] {
        absl::MutexLock lock(&mu_);
        return stopped_ || withdrawn_;
      });
  const bool skipped = end.how == ChildEnd::How::kStopped;
  const char* result = end.ok()                              ? "success"
                       : skipped                             ? "skipped"
                       : end.how == ChildEnd::How::kTimedOut ? "timeout"
                                                             : "failed";
  if (!skipped) Keep(published, !end.ok());
  if (end.ok()) {
    Log(LogLevel::kInfo, "on_published", "a checkpoint's command is done",
        {{"run_id", published.run_id}, {"step", published.step}, {"path", published.folder}, {"dur_s", end.seconds}});
  } else {
    Log(skipped ? LogLevel::kWarn : LogLevel::kError, "on_published", "a checkpoint's command did not succeed",
        {{"run_id", published.run_id},
         {"step", published.step},
         {"path", published.folder},
         {"dur_s", end.seconds},
         {"reason", end.ToString()},
         {"err", end.said}});
  }
  Told told;
  {
    absl::MutexLock lock(&mu_);
    told = told_;
  }
  if (told) told(published.run_id, result);
}

}  // namespace ballast
