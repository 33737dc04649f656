// The signals that end a daemon: SIGTERM, SIGINT, and SIGHUP where the terminal that it was started at is gone.
#pragma once

#include <functional>

namespace ballast {

class StopSignals {
 public:
  // Holds them back. Before any thread exists, so that all inherit it and the signals come to Await alone.
  StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // Waits for one, and returns it. on_reload: SIGHUP came, which ends nothing here.
  int Await(const std::function<void()>& on_reload) const;
  // From here on SIGTERM or SIGINT is handled so, on any thread, and SIGHUP does nothing.
  static void OnNext(void (*handler)(int signal));

 private:
  // Whether a terminal that was there at the start is none any more.
  bool TerminalIsGone() const;

  const bool ignores_hangup_;              // whoever started the process wanted it so (nohup)
  const bool terminal_in_, terminal_err_;  // stdin and stderr were one
};

}  // namespace ballast
