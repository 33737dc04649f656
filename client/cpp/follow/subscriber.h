// ballast::Subscriber: a reader that keeps up with a run's weights, such as an evaluator or an inference engine
// (proto/PROTOCOL.md, "Following a run").
//
//   auto reader = ballast::Subscriber::Open({.server = "node7:7700"}, {.run_id = "r1"}).value();   // or all its daemons
//   for (;;) {
//     const auto version = reader->Next(60);                 // absl::StatusOr<std::optional<FollowedVersion>>
//     if (!version.ok()) return version.status();
//     if (!*version) continue;                               // none within a minute
//     for (const uint32_t i : (*version)->changed) reader->Read(i, destination[i]);
//   }
//
// A version is the weights of all tensors after one step. All are kept here once, as the daemon serves them: codes, and
// scales where the format has them. Of a version that changes the one that is here, the changes are kept in addition
// while they come; Next writes them when all are here. One that comes whole is written as it comes, but only once Next was
// called: from then until Next returns one there are no weights to read, which Await avoids. So what is read is of the
// version that Next returned last, and never of two.
//
// Threads: a thread of its own receives and checks. All but Close, Rollback and Resume comes from one thread at a time
// (thread-compatible); those, from any. In a fork each call is refused (FAILED_PRECONDITION), as Client's are.
//
// A lost connection is made again by itself for `reconnect_timeout_s`, asking for what has changed since, or where that is
// not known for the tensors that differ; a daemon that says when to ask again is asked then. Chunks whose checksum differs,
// or tensors whose digest does, are asked for again, as is what comes out of order: three times in a row.
//
// Errors: absl::Status with the daemon's code and message, and then every Next returns it. NOT_FOUND: there is no such
// run, or it was deleted. FAILED_PRECONDITION: it has no RunSpec.follow, not that average or format, or no weights yet; or
// the daemons that are named are not all of the run's. INVALID_ARGUMENT: this client knows no such format, or two options
// exclude each other. UNIMPLEMENTED: the daemon is older than this. RESOURCE_EXHAUSTED: it has as many readers as it
// takes, or there is no memory for its weights. DATA_LOSS, INTERNAL: what comes is damaged, or out of order, again and again. UNAVAILABLE: the
// daemon cannot be reached. CANCELLED: Close was called.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "ballast/v1/run.pb.h"
#include "client/cpp/client.h"

namespace ballast {

struct SubscribeOptions {
  std::string run_id;
  // No version is handed out whose step is nearer to that of the last one than this; 0: each that is made. What changes come
  // by way of versions in between is counted with the one that is.
  uint64_t every = 0;
  // For CountChanged and ReadChanged: a bit of memory for each parameter.
  bool marks_changed = false;
  std::string tag = {};  // begins as after Rollback(tag)
  // In place of the weights their average with this decay, one of RunSpec.averages, where RunSpec.follow.averages is set.
  std::optional<double> average = {};
  // All tensors in this format, one of RunSpec.follow.formats or the one that they are all served in, such as bf16 of a run
  // that is served in fp32; not beside `average` or `tag`. Empty: each as it is served.
  std::string format = {};
  // How long Open waits for a run that its trainers have not begun, or whose weights they have not loaded. 0: not at all.
  double wait_for_run_s = 0;
};

struct FollowedVersion {
  // After a rewind steps are counted anew, in a later generation.
  uint64_t step = 0, generation = 0;
  std::optional<uint64_t> base_step = {};  // of the version that it came as a change of; none: it came whole
  std::vector<uint32_t> changed = {};      // tensors that may be others than in the version before, ascending
  uint64_t changed_elements = 0,
           elements = 0;        // that were changed, or came whole, since the version before; of the run
  uint64_t received_bytes = 0;  // of positions, values and scales
  uint64_t whole_bytes = 0;     // of all codes and scales of the run
  uint64_t skipped = 0;         // versions that were made since the one before, and did not come
  double closed_unix_s = 0;     // when its step closed, by the daemon's clock
  std::string tag = {};         // the name that it was asked for by (Subscriber::Rollback); empty: it is the newest
  // The run was amended: spec() names other tensors, or formats, than with the version before.
  bool respecified = false;

  // For how long its weights have been there, by this machine's clock.
  double StalenessSeconds() const;
};

// A tensor's weights as they are served, valid until the next call of Next. A weight of int8 is code * scale / 127.
struct FollowedTensor {
  std::string format;
  absl::Span<const std::byte> codes;
  absl::Span<const float> scales;  // of the rows of an int8-row tensor, or an int8-tensor's one; else none
};

class Subscriber {
 public:
  // Reads the run's spec, when it is there, and begins to receive.
  static absl::StatusOr<std::unique_ptr<Subscriber>> Open(ClientOptions options, const SubscribeOptions& subscription);
  virtual ~Subscriber() = default;  // as Close
  Subscriber(const Subscriber&) = delete;
  Subscriber& operator=(const Subscriber&) = delete;

  // The next version, whose weights are then those that are here. None: it is not here within timeout_s.
  virtual absl::StatusOr<std::optional<FollowedVersion>> Next(double timeout_s) = 0;
  // Waits until Next has something to do or to tell, and changes no weights. False: nothing within timeout_s.
  virtual bool Await(double timeout_s) = 0;

  // Of the weights that are here. It changes within Next alone: FollowedVersion.respecified. Where they are followed in a
  // format that is that of a run which is served in it: its groups' `serving`, and, where a trainer may compute in it (fp32,
  // bf16, fp16), its tensors' `dtype`.
  virtual const v1::RunSpec& spec() const = 0;
  // Whether there are: the others of these calls are FAILED_PRECONDITION where not.
  virtual bool readable() const = 0;
  // INVALID_ARGUMENT: there is no such tensor.
  virtual absl::StatusOr<FollowedTensor> Served(uint32_t tensor) const = 0;
  // The tensor in its dtype, decoded where it is served in another format. INVALID_ARGUMENT: `out` has another size.
  virtual absl::Status Read(uint32_t tensor, absl::Span<std::byte> out) const = 0;

  // How many of the tensor's elements have come since the version before: all others are as they were. Where a scale has
  // changed, all elements of its rows in the chunks that came. FAILED_PRECONDITION: the subscription does not mark them.
  virtual absl::StatusOr<uint64_t> CountChanged(uint32_t tensor) const = 0;
  // Their places in the tensor, ascending, as if it had one dimension, and their values as Read has them. INVALID_ARGUMENT:
  // `places` or `values` has another size.
  virtual absl::Status ReadChanged(uint32_t tensor, absl::Span<int64_t> places, absl::Span<std::byte> values) const = 0;
  // Goes to the version of this name (v1::FollowService.TagVersion) and stays there: Next returns it, as a version with that
  // `tag`, and then none, until Resume. One that had come already may be returned before it. NOT_FOUND, with the names that
  // there are, FAILED_PRECONDITION: it cannot be read; INVALID_ARGUMENT: the subscription is to an average, or in another
  // format; then all is as before. From any thread.
  virtual absl::Status Rollback(const std::string& tag) = 0;
  // Goes on with the newest versions. From any thread.
  virtual void Resume() = 0;

  // Ends the call to the daemon; Next, also one that waits, returns CANCELLED. Never waits for the daemon.
  virtual void Close() = 0;

 protected:
  Subscriber() = default;
};

}  // namespace ballast
