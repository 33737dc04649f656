# cmake --install BUILD --prefix P: P/bin has the programs, P/lib the client and the protocol as archives, with a CMake
# package (find_package(ballast), target ballast::client) and a pkg-config file (ballast), and P/include/ballast their
# headers, under the paths that they have in the tree: #include "client/cpp/client.h". P may be moved afterwards.
include(CMakePackageConfigHelpers)

set(include_dir include/ballast)
set(package_dir lib/cmake/ballast)

set_target_properties(ballast_client PROPERTIES EXPORT_NAME client)
set_target_properties(ballast_proto PROPERTIES EXPORT_NAME proto)
set_target_properties(ballast_tls PROPERTIES EXPORT_NAME tls)
foreach(target ballast_client ballast_proto ballast_tls)
  target_include_directories(${target} INTERFACE $<INSTALL_INTERFACE:${include_dir}>)
endforeach()

install(TARGETS ballast_client ballast_proto ballast_tls EXPORT ballast ARCHIVE DESTINATION lib)
install(EXPORT ballast NAMESPACE ballast:: FILE ballast-targets.cmake DESTINATION ${package_dir})
install(TARGETS ballastd RUNTIME DESTINATION bin)

# What client.h and follow/subscriber.h include of the project's.
install(FILES client.h shard.h DESTINATION ${include_dir}/client/cpp)
install(FILES follow/subscriber.h DESTINATION ${include_dir}/client/cpp/follow)
install(FILES ${PROJECT_SOURCE_DIR}/proto/rewound.h DESTINATION ${include_dir}/proto)
foreach(name admin follow nccl run trainer)
  install(FILES ${PROJECT_BINARY_DIR}/proto/gen/ballast/v1/${name}.pb.h DESTINATION ${include_dir}/ballast/v1)
  install(FILES ${PROJECT_SOURCE_DIR}/proto/ballast/v1/${name}.proto DESTINATION ${include_dir}/ballast/v1)
endforeach()

configure_file(ballast-config.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/ballast-config.cmake COPYONLY)
# Before 1.0 a minor version may change the interface.
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/ballast-config-version.cmake
                                 VERSION ${PROJECT_VERSION} COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/ballast-config.cmake
              ${CMAKE_CURRENT_BINARY_DIR}/ballast-config-version.cmake DESTINATION ${package_dir})

configure_file(ballast.pc.in ${CMAKE_CURRENT_BINARY_DIR}/ballast.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/ballast.pc DESTINATION lib/pkgconfig)
