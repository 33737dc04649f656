#include "server/base/stop_signals.h"

#include <signal.h>
#include <unistd.h>

namespace ballast {
namespace {

sigset_t StopSet() {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : {SIGTERM, SIGINT, SIGHUP}) sigaddset(&set, signal);
  return set;
}

bool IgnoresHangup() {
  struct sigaction now {};
  return sigaction(SIGHUP, nullptr, &now) == 0 && now.sa_handler == SIG_IGN;
}

}  // namespace

StopSignals::StopSignals()
    : ignores_hangup_(IgnoresHangup()),
      terminal_in_(isatty(STDIN_FILENO) != 0),
      terminal_err_(isatty(STDERR_FILENO) != 0) {
  const sigset_t set = StopSet();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
}

bool StopSignals::TerminalIsGone() const {
  return (terminal_in_ && isatty(STDIN_FILENO) == 0) || (terminal_err_ && isatty(STDERR_FILENO) == 0);
}

int StopSignals::Await(const std::function<void()>& on_reload) const {
  const sigset_t set = StopSet();
  while (true) {
    int signal = 0;
    if (sigwait(&set, &signal) != 0) continue;
    if (signal != SIGHUP || (TerminalIsGone() && !ignores_hangup_)) return signal;
    on_reload();
  }
}

void StopSignals::OnNext(void (*handler)(int signal)) {
  struct sigaction action {};
  action.sa_handler = handler;
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : {SIGTERM, SIGINT}) {
    sigaction(signal, &action, nullptr);
    sigaddset(&set, signal);
  }
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
}

}  // namespace ballast
