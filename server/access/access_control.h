// The grants in use: read from the file of the configuration's key `access`, and read again when it changes, so that
// tokens are replaced and taken back without a restart. A new file that is not right changes nothing: the grants before
// stay in use, and the log (access_reload) and the metrics say so. Grants that expire are told in the log, too
// (grant_expiring), a week before; the metrics have the first one's time, and no grant's name, since who reads them need
// not know who is let in.
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
  // usual: the quota of grants that say nothing else. `metrics` outlives it. FAILED_PRECONDITION: the file is not right.
  static absl::StatusOr<std::unique_ptr<AccessControl>> Open(const std::string& file, const Quota& usual,
                                                             Metrics* metrics,
                                                             absl::Duration look_every = FileWatcher::kLookEvery);

  // As AccessList::Find, now.
  absl::StatusOr<std::shared_ptr<const Grant>> Find(const Caller& caller, Scope scope,
                                                    std::optional<absl::string_view> run) const;

 private:
  AccessControl(std::string file, const Quota& usual, Metrics* metrics)
      : file_(std::move(file)), usual_(usual), metrics_(metrics) {}
  void ReadAgain();
  void Use(AccessList read);
  void WarnOfExpiry();
  std::shared_ptr<const AccessList> current() const;

  const std::string file_;
  const Quota usual_;
  Metrics* const metrics_;
  mutable absl::Mutex mu_;
  std::shared_ptr<const AccessList> list_ ABSL_GUARDED_BY(mu_);
  std::shared_ptr<const AccessList> warned_of_;  // and of how many of its grants; the watcher's thread's
  size_t warned_ = 0;
  std::unique_ptr<FileWatcher> watcher_;  // last: its thread uses the rest
};

}  // namespace ballast
