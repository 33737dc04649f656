// Tells when files have changed, whatever way they were replaced: they are looked at every second, and have changed when
// two looks find them the same and other than before. So files that are replaced one after the other are not read in
// between. One thread of its own, asleep between looks.
#pragma once

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/time.h"
#include "proto/tls/certificate_files.h"

#include "server/base/stop_signal.h"

namespace ballast {

class FileWatcher {
 public:
  static constexpr absl::Duration kLookEvery = absl::Seconds(1);

  // Looks at them for the first time; an empty name is no file.
  FileWatcher(std::vector<std::string> files, absl::Duration look_every);
  ~FileWatcher();  // waits for on_changed

  // Once. `on_changed` reads the files, on the watcher's thread; files that change while it does, are told of again.
  // `on_look`, if any, is called after each look.
  void Start(std::function<void()> on_changed, std::function<void()> on_look = nullptr);
  // In on_changed, when it has read them: whether they are still those that it was called for. Otherwise what it read may
  // be of both, and it is called again.
  bool Steady() const { return Look() == judged_; }

 private:
  using Stamps = std::vector<FileStamp>;
  Stamps Look() const;
  void Run();
  void LookAgain();

  const std::vector<std::string> files_;
  const absl::Duration look_every_;
  Stamps judged_, looked_;  // of the files that were read last, and of the last look; the thread's
  std::function<void()> on_changed_, on_look_;
  StopSignal stop_;
  std::thread thread_;
};

}  // namespace ballast
