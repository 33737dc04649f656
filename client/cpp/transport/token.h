// The token that every call of a connection brings, where the daemon asks for one.
#pragma once

#include <grpcpp/support/client_interceptor.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "proto/tls/certificate_files.h"

#include "client/cpp/client.h"

namespace ballast {

// A token in a file, which is read again when it has changed. Thread-safe.
class TokenFile {
 public:
  // FAILED_PRECONDITION: as ReadToken (proto/tls/token_file.h).
  static absl::StatusOr<std::shared_ptr<TokenFile>> Open(const std::string& file);

  // The one that the file holds now; where it holds none, the one before.
  std::string Current();

 private:
  TokenFile(std::string file, FileStamp stamp, std::string token)
      : file_(std::move(file)), stamp_(stamp), token_(std::move(token)) {}

  const std::string file_;
  absl::Mutex mu_;
  FileStamp stamp_ ABSL_GUARDED_BY(mu_);
  std::string token_ ABSL_GUARDED_BY(mu_);
};

using Interceptors = std::vector<std::unique_ptr<grpc::experimental::ClientInterceptorFactoryInterface>>;

// What adds "authorization: Bearer TOKEN" to each call of a channel, a stream's once; nothing without token_file.
// FAILED_PRECONDITION: the server is reached neither over TLS nor by a Unix socket; or as TokenFile::Open.
absl::StatusOr<Interceptors> BringToken(const ClientOptions& options);

}  // namespace ballast
