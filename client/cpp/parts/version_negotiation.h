// On which version the readers of a run's parts agree: each daemon makes versions at its own pace, and what is handed out is
// to be of one step on all.
//
//   VersionNegotiation negotiation(parts, every);
//   if (negotiation.WantsTimelines(standings)) {
//     const auto decision = negotiation.Decide(standings, timelines);   // asked of the daemons, after the standings
//     decision.agreed ? hand out : tell each part its Order;
//   }
//
// That it gets there. Daemons make the run's steps together, so none is more than one ahead, and a daemon makes a version of
// the first step that a reader of a part wants, unless it is making another. So where parts have come to different steps, the
// ones behind are sent on to the one that is furthest. Where they miss that, all are told the same step ahead, and no nearer
// one, twice as far with each time: once that is further than a daemon takes to make a version, and than the telling takes,
// all make that very step. From there on they go by strides of that length, which become shorter again by and by.
//
// That it is one version. A step may be made twice, after a rewind or by a daemon that was started again, and generations
// differ between daemons. A version is of the run as it is if its daemon makes versions of that generation and epoch still
// when all parts' versions are here: a step that all have so has been closed together, for none could have begun it anew
// without having been taken back.
//
// Pure: no clock, no thread. Thread-compatible.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/types/span.h"

#include "ballast/v1/follow.pb.h"
#include "client/cpp/follow/held_subscriber.h"

namespace ballast {

class VersionNegotiation {
 public:
  // As SubscribeOptions::every.
  VersionNegotiation(size_t parts, uint64_t every);

  // Of one part.
  struct Standing {
    std::optional<v1::VersionId> offered = {}, here = {};  // as HeldSubscriber::Standing
    std::optional<v1::VersionId> handed = {};              // that was handed out last
  };
  using Timeline = HeldSubscriber::Timeline;

  // HeldSubscriber::Seek of one part.
  struct Order {
    size_t part = 0;
    std::optional<uint64_t> from = {};
    uint64_t every = 1;
    bool operator==(const Order&) const = default;
  };
  struct Decision {
    bool agreed = false;  // what each offers, or else has here, is one version of the run
    std::vector<Order> orders = {};
  };

  // Whether some part has something that was not handed out.
  static bool HasNew(absl::Span<const Standing> standings);
  // Whether something is to be decided, for which the daemons must be asked.
  bool WantsTimelines(absl::Span<const Standing> standings) const;
  // By part, asked after the standings were seen.
  Decision Decide(absl::Span<const Standing> standings, absl::Span<const Timeline> now);
  // What parts are told once the version that was agreed on was handed out; empty: they go on as they are.
  std::vector<Order> OnHandedOut();
  // The run may be at rest, short of the step that parts were told or that they wait for: each goes on to what there is. Not one
  // whose weights are of no version, unless it waits for a step too: it is being sent one.
  std::vector<Order> Relax(absl::Span<const Standing> standings);
  // A part whose offer is of no use goes on to the next.
  Order GoOn(size_t part) { return Tell({.part = part, .every = stride_}); }
  // Whether some part waits for more than its next version: Relax would change that.
  bool strict() const;

 private:
  Order Tell(const Order& order);
  Decision OnDifferent(absl::Span<const Standing> standings, uint64_t furthest);

  const uint64_t every_;
  uint64_t stride_;          // at least `every_`: that times a power of two
  std::vector<Order> told_;  // by part, last: what it waits for
  int missed_ = 0;           // times in a row that parts have come to different steps
  int calm_ = 0;             // versions in a row without that
  std::vector<Timeline> known_ = {};
};

}  // namespace ballast
