// A subscriber of a FakeFollowService for tests.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "client/cpp/follow/subscriber.h"
#include "tests/client/follow/fake_follow_service.h"

namespace ballast {

constexpr double kLongS = 60;  // for what is there soon

struct Reader {
  explicit Reader(const std::string& server, double reconnect_timeout_s = 10, uint64_t every = 0,
                  bool marks_changed = false)
      : subscriber(Subscriber::Open({.server = server,
                                     .reconnect_timeout_s = reconnect_timeout_s,
                                     .log =
                                         [this](const std::string& line) {
                                           absl::MutexLock lock(&mu);
                                           lines.push_back(line);
                                         }},
                                    {.run_id = "r", .every = every, .marks_changed = marks_changed})
                       .value()) {}
  ~Reader() { subscriber.reset(); }  // before what it writes to

  // The next version; fails the test if there is none.
  FollowedVersion Next() {
    const auto version = subscriber->Next(kLongS);
    EXPECT_TRUE(version.ok()) << version.status();
    if (!version.ok() || !*version) {
      ADD_FAILURE() << "there is no version";
      return {};
    }
    return **version;
  }
  absl::Status Failure() { return subscriber->Next(kLongS).status(); }
  // Whether its weights are these.
  void Expect(const FollowedRun& run) const {
    for (uint32_t i = 0; i < run.codes.size(); ++i) {
      const auto served = subscriber->Served(i);
      ASSERT_TRUE(served.ok()) << served.status();
      EXPECT_EQ(std::string(reinterpret_cast<const char*>(served->codes.data()), served->codes.size()), run.codes[i])
          << i;
      EXPECT_EQ(std::vector<float>(served->scales.begin(), served->scales.end()), run.scales[i]) << i;
    }
  }
  std::vector<std::string> Lines() {
    absl::MutexLock lock(&mu);
    return lines;
  }

  absl::Mutex mu;
  std::vector<std::string> lines ABSL_GUARDED_BY(mu);
  std::unique_ptr<Subscriber> subscriber;
};

}  // namespace ballast
