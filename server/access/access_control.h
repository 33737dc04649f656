// The grants in use: read from the file of the configuration's key `access`, and read again when it changes, so that
// tokens are replaced and taken back without a restart. A new file that is not right changes nothing: the grants before
// stay in use, and the log (access_reload) and the metrics say so.
//
// A call is looked at when it begins, a stream once: what it was given stays until it ends. Thread-safe.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

#include "server/access/access_list.h"
#include "server/base/file_watcher.h"
#include "server/metrics/metrics.h"

namespace ballast {

class AccessControl {
 public:
  // `metrics` outlives it. FAILED_PRECONDITION: the file is not right.
  static absl::StatusOr<std::unique_ptr<AccessControl>> Open(const std::string& file, Metrics* metrics,
                                                             absl::Duration look_every = FileWatcher::kLookEvery);

  // As AccessList::Find, now.
  absl::StatusOr<std::string> Find(const Caller& caller, Scope scope, std::optional<absl::string_view> run) const;

 private:
  AccessControl(std::string file, Metrics* metrics) : file_(std::move(file)), metrics_(metrics) {}
  void ReadAgain();

  const std::string file_;
  Metrics* const metrics_;
  mutable absl::Mutex mu_;
  std::shared_ptr<const AccessList> list_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<FileWatcher> watcher_;  // last: its thread uses the rest
};

}  // namespace ballast
