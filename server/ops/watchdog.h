// Sees to it that a daemon that no longer answers its own check is restarted by whatever started it: by systemd, which
// is told regularly that all is well (sd_notify(3), WatchdogSec), or by any supervisor, since the process is ended. One
// thread of its own.
#pragma once

#include <functional>
#include <thread>

#include "absl/status/status.h"

#include "server/base/stop_signal.h"

namespace ballast {

class Watchdog {
 public:
  struct Options {
    std::function<absl::Status()> live;  // as in /livez; must not block
    double look_every_s = 1;
    std::function<void()> tell;                          // all is well, at each look; none: nobody wants to know
    double most_silent_s = 0;                            // 0: any time
    std::function<void(const absl::Status&)> on_silent;  // once `live` was not OK for so long; at each look after that
  };
  explicit Watchdog(Options options);
  ~Watchdog();  // waits for a call that is under way

 private:
  void Run();

  const Options options_;
  StopSignal stop_;
  std::thread thread_;
};

}  // namespace ballast
