// Runs the operator's command (storage.on_published) for each checkpoint that is published: one at a time, in the
// background, on a thread of its own. Neither steps nor the next checkpoint wait for it.
//
//   PublishedCommand command({.command = {"/usr/bin/rclone", "copy", "{folder}", "remote:b/{run}/{step}"}});
//   command.OnPublished({.run_id = "r1", .folder = "/data/runs/r1/000000000007-step-120", .place = {7, 120}});
//   if (command.Uses(folder)) ...                           // it must not be removed now
//
// Of each run at most one checkpoint waits for its turn, the newest, and of all runs at most kMostWaiting. What becomes of
// each is told once: success, failed, timeout; or skipped, which is neither.
//
// Thread-safe.
#pragma once

#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

#include "server/base/child_process.h"

namespace ballast {

class PublishedCommand {
 public:
  static constexpr size_t kMostWaiting = 64;

  struct Options {
    std::vector<std::string> command;  // empty: there is none, and every call does nothing
    double timeout_s = 600;
    double grace_s = 10;  // as ChildOptions
  };
  struct Published {
    std::string run_id;
    std::string folder;
    uint64_t number = 0, step = 0;
  };
  // On the command's thread, or on the caller's of the call that left it out.
  using Told = std::function<void(const std::string& run_id, std::string_view result)>;

  explicit PublishedCommand(Options options);
  ~PublishedCommand();  // as Stop(0)

  // Who is told; before the first checkpoint.
  void Tell(Told told);

  void OnPublished(Published published);
  // Somebody wants the checkpoint, which is the newest of its run: where its command failed, or took too long, and has not
  // been run again since, it is offered anew.
  void OfferAgain(const std::string& folder);
  // Whether the command runs on that folder now.
  bool Uses(const std::string& folder) const;
  // The checkpoint counts no more, or is about to be removed by somebody's wish: its command is left out, or ended. Does
  // not wait for that end.
  void Withdraw(const std::string& folder);
  // Lets what runs and waits end within so many seconds, ends what is left, and returns when nothing runs. Whatever is
  // published afterwards is left out.
  void Stop(double within_s);

 private:
  void Loop();
  void RunOne(const Published& published);
  void Keep(const Published& published, bool failed);
  void LeaveOut(const Published& published, const char* why) const;
  std::vector<std::string> CommandOf(const Published& published) const;

  const Options options_;
  mutable absl::Mutex mu_;
  Told told_ ABSL_GUARDED_BY(mu_);
  std::deque<Published> waiting_ ABSL_GUARDED_BY(mu_);
  std::vector<Published> failed_ ABSL_GUARDED_BY(mu_);  // of each run at most the last one
  std::string in_use_ ABSL_GUARDED_BY(mu_);             // folder; empty: no command runs
  bool withdrawn_ ABSL_GUARDED_BY(mu_) = false;         // what runs
  bool closed_ ABSL_GUARDED_BY(mu_) = false;            // nothing more is taken
  bool stopped_ ABSL_GUARDED_BY(mu_) = false;           // what runs is ended
  std::thread thread_;
};

}  // namespace ballast
