module example.invalid/tallyroom/worker

go 1.22
