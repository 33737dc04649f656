// What a reader follows: a run that trains here, or one that is relayed.
//
// Thread-safe; nothing here waits.
#pragma once

#include <memory>

#include "server/follow/follow_job.h"
#include "server/follow/version_sink.h"
#include "server/spec/run_spec.h"

namespace ballast {

class VersionSource {
 public:
  virtual ~VersionSource() = default;
  virtual const RunSpec& spec() const = 0;
  // The sink gets versions until either side ends it. A refusal ends it, too.
  virtual void Follow(std::shared_ptr<VersionSink> sink, FollowOrder order) = 0;
  // What the sink sent last is with its reader.
  virtual void OnVersionSent(std::shared_ptr<VersionSink> sink) = 0;
  virtual void OnFollowerGone(std::shared_ptr<VersionSink> sink) = 0;
};

}  // namespace ballast
